#include "kvferry/pool_lists.h"

namespace kvferry {

void Lists::push(uint32_t id, uint8_t flag) {
    Entry& entry = entries_[id];
    List& list = list_of(id, flag);
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
    slab.listed_soft += flag == kInSoft ? 1 : 0;
    safe_[entry.size_class] += flag == kInProtected ? 1 : 0;
}

void Lists::remove(uint32_t id) {
    Entry& entry = entries_[id];
    const uint8_t flag = entry.flags & kInList;
    if (flag == 0) {
        return;
    }
    List& list = list_of(id, flag);
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
    slab.listed_soft -= flag == kInSoft ? 1 : 0;
    safe_[entry.size_class] -= flag == kInProtected ? 1 : 0;
}

uint32_t Lists::older(uint32_t a, uint32_t b) const {
    if (a == kNone || b == kNone) {
        return a == kNone ? b : a;
    }
    return entries_[b].last_use() < entries_[a].last_use() ? b : a;
}

uint32_t Lists::tail(uint8_t size_class, uint8_t flag) const {
    uint32_t found = kNone;
    for (uint32_t owner = 0; owner < owners_.end(); ++owner) {
        found = older(found, list(size_class, owner, flag).tail);
    }
    return found;
}

uint32_t Lists::first_of(uint32_t once, uint32_t again, bool within_share) const {
    if (once == kNone || again == kNone) {
        return once != kNone ? once : again;
    }
    return within_share ? once : older(once, again);
}

uint32_t Lists::coldest(uint8_t size_class, bool soft) const {
    if (soft) {
        return tail(size_class, kInSoft);
    }
    const bool within_share = safe_[size_class] <= slabs_.in_class(size_class).used / 8;
    return first_of(tail(size_class, kInProbation), tail(size_class, kInProtected), within_share);
}

uint32_t Lists::coldest_of(uint32_t owner, uint8_t size_class) const {
    const auto in_class = [&](uint8_t c) {
        const List& once = list(c, owner, kInProbation);
        const List& again = list(c, owner, kInProtected);
        return first_of(once.tail, again.tail, again.size <= (once.size + again.size) / 8);
    };
    const auto in_any = [&](const auto& of_class) {
        uint32_t found = of_class(size_class);  // its slot is the one that is needed
        for (uint8_t c = 0; found == kNone && c < kClassesMax; ++c) {
            found = of_class(c);
        }
        return found;
    };
    const uint32_t plain = in_any(in_class);
    return plain != kNone ? plain : in_any([&](uint8_t c) { return list(c, owner, kInSoft).tail; });
}

}  // namespace kvferry
