#include "kvferry/pool_lists.h"

namespace kvferry {

void Lists::push(uint32_t id, uint8_t flag) {
    Entry& entry = entries_[id];
    List& list = list_of(entry.size_class, flag);
    links_[id] = {kNone, list.head};
    if (list.head != kNone) {
        links_[list.head].prev = id;
    } else {
        list.tail = id;
    }
    list.head = id;
    ++list.size;
    entry.flags |= flag;
    Slab& slab = slabs_.of(entry.slot);
    ++slab.listed;
    slab.listed_safe += flag == kInProtected ? 1 : 0;
}

void Lists::remove(uint32_t id) {
    Entry& entry = entries_[id];
    const uint8_t flag = entry.flags & kInList;
    if (flag == 0) {
        return;
    }
    List& list = list_of(entry.size_class, flag);
    const Links links = links_[id];
    if (links.prev != kNone) {
        links_[links.prev].next = links.next;
    } else {
        list.head = links.next;
    }
    if (links.next != kNone) {
        links_[links.next].prev = links.prev;
    } else {
        list.tail = links.prev;
    }
    --list.size;
    entry.flags &= static_cast<uint8_t>(~kInList);
    Slab& slab = slabs_.of(entry.slot);
    --slab.listed;
    slab.listed_safe -= flag == kInProtected ? 1 : 0;
}

uint32_t Lists::coldest(uint8_t size_class) const {
    const Pair& pair = lists_[size_class];
    const uint32_t once = pair.probation.tail;
    const uint32_t again = pair.safe.tail;
    if (once == kNone || again == kNone) {
        return once != kNone ? once : again;
    }
    const bool within_share = pair.safe.size <= slabs_.in_class(size_class).used / 8;
    return within_share || entries_[once].last_use() < entries_[again].last_use() ? once : again;
}

}  // namespace kvferry
