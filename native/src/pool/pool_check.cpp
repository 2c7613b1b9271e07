// Integrity of everything that has to agree: used by the tests and by an idle sidecar.
#include <array>
#include <sstream>

#include "kvferry/pool.h"

namespace kvferry {

class PoolChecker {
  public:
    explicit PoolChecker(const Pool& pool) : pool_(pool), entry_count_(pool.layout_.keys_max) {}

    std::vector<std::string> run() {
        check_header();
        check_entries();
        check_free_ids();
        check_buckets();
        for (uint8_t c = 0; c < kClassesMax; ++c) {
            for (uint32_t owner = 0; owner < pool_.owners_.end(); ++owner) {
                check_list(c, owner, kInProbation);
                check_list(c, owner, kInProtected);
                check_list(c, owner, kInSoft);
            }
        }
        check_owners();
        check_slabs();
        check_counters();
        return std::move(problems_);
    }

  private:
    struct SlabTally {
        uint32_t used = 0;
        uint32_t listed = 0;
        uint32_t listed_safe = 0;
        uint32_t listed_soft = 0;
        uint64_t newest_use = 0;
    };

    template <class... Parts>
    void problem(const Parts&... parts) {
        constexpr size_t kProblemsMax = 20;  // one damage shows up in many places
        if (problems_.size() < kProblemsMax) {
            std::ostringstream text;
            (text << ... << parts);
            problems_.push_back(text.str());
        }
    }

    void check_header() {
        try {
            validate_header(pool_.header(), pool_.layout_.segment_bytes);
        } catch (const PoolFormatError& error) {
            problem("header: ", error.what());
        }
        for (uint8_t c = 0; c < kClassesMax; ++c) {
            const SizeClass& cls = pool_.slabs_.in_class(c);
            if (cls.slabs > 0 && decode_class(pool_.header().classes[c]) != cls.units) {
                problem("class ", int{c}, ": the header's slot size differs");
            }
        }
    }

    void check_entries() {
        tallies_.resize(pool_.slabs_.all().size());
        for (uint32_t id = 0; id < entry_count_; ++id) {
            const Entry& entry = pool_.entries_[id];
            const auto state = static_cast<size_t>(entry.load_state());
            if (state >= states_.size()) {
                problem("entry ", id, ": impossible state ", state);
                continue;
            }
            ++states_[state];
            if (entry.load_state() != EntryState::kFree) {
                check_used_entry(id, entry);
            } else if (entry.leases != 0 || (entry.flags & kInList) != 0) {
                problem("entry ", id, ": free, but leased or listed");
            }
        }
    }

    void check_used_entry(uint32_t id, const Entry& entry) {
        const EntryState state = entry.load_state();
        leased_ += entry.leases > 0 ? 1 : 0;
        const bool listed = (entry.flags & kInList) != 0;
        const bool evictable =
            state == EntryState::kReady && entry.leases == 0 && (entry.flags & kPinHard) == 0;
        if (listed != evictable) {
            problem("entry ", id, ": listed ", listed, ", evictable ", evictable);
        }
        if (((entry.flags & kInSoft) != 0) > ((entry.flags & kPinSoft) != 0)) {
            problem("entry ", id, ": listed as pinned, and is not");
        }
        if ((state == EntryState::kWriting) && entry.leases > 0) {
            problem("entry ", id, ": writing and leased");
        }
        if ((state == EntryState::kDoomed) && entry.leases == 0) {
            problem("entry ", id, ": doomed without a lease");
        }
        if (entry.last_use() > pool_.use_) {
            problem("entry ", id, ": used in the future");
        }
        if (pool_.buckets_.find(entry.key) != id) {
            problem("entry ", id, ": its key does not lead to it");
        }
        if (pool_.slabs_.owner_of(entry.slot) != id) {
            problem("entry ", id, ": its slot has another owner");
            return;
        }
        const uint64_t slab = entry.slot / (pool_.layout_.slab_bytes / kUnitBytes);
        if (pool_.slabs_.all()[slab].size_class != entry.size_class) {
            problem("entry ", id, ": its slab has another size class");
        }
        SlabTally& tally = tallies_[slab];
        ++tally.used;
        tally.listed += listed ? 1 : 0;
        const uint32_t row = pool_.notes_[id].owner;
        if (row >= pool_.owners_.end()) {
            problem("entry ", id, ": its owner's row was never taken");
        } else {
            ++owners_[row].entries;
            owners_[row].units += pool_.slabs_.in_class(entry.size_class).units;
        }
        pinned_soft_ += (entry.flags & kPinSoft) != 0 ? 1 : 0;
        pinned_hard_ += (entry.flags & kPinHard) != 0 ? 1 : 0;
        tally.listed_safe += (entry.flags & kInProtected) != 0 ? 1 : 0;
        tally.listed_soft += (entry.flags & kInSoft) != 0 ? 1 : 0;
        tally.newest_use = std::max(tally.newest_use, entry.last_use());
    }

    void check_free_ids() {
        uint64_t chained = 0;
        for (uint32_t id = pool_.free_id_; id != kNone; id = pool_.links_[id].next) {
            if (id >= entry_count_ || pool_.entries_[id].load_state() != EntryState::kFree ||
                ++chained > entry_count_) {
                problem("free chain: broken at ", id);
                return;
            }
        }
        if (chained != states_[static_cast<size_t>(EntryState::kFree)]) {
            problem("free chain: has ", chained, " of ", states_[0], " free entries");
        }
    }

    void check_buckets() {
        uint64_t filled = 0;
        for (uint64_t at = 0; at < pool_.buckets_.count(); ++at) {
            const uint32_t id = pool_.buckets_.id_at(at);
            if (id == kNone) {
                continue;
            }
            ++filled;
            if (id >= entry_count_ || pool_.entries_[id].load_state() == EntryState::kFree) {
                problem("bucket ", at, ": names entry ", id, ", which is not in use");
            } else if (pool_.buckets_.ready_at(at) !=
                       (pool_.entries_[id].load_state() == EntryState::kReady)) {
                problem("bucket ", at, ": differs from entry ", id, " in whether it is ready");
            }
        }
        if (filled != entry_count_ - states_[static_cast<size_t>(EntryState::kFree)]) {
            problem("buckets: ", filled, " filled, but that many entries are not in use");
        }
    }

    void check_list(uint8_t size_class, uint32_t owner, uint8_t flag) {
        const List& list = pool_.lists_.list(size_class, owner, flag);
        uint64_t size = 0;
        uint32_t before = kNone;
        uint64_t use = pool_.use_;
        for (uint32_t id = list.head; id != kNone; id = pool_.links_[id].next) {
            if (id >= entry_count_ || ++size > list.size || pool_.links_[id].prev != before) {
                problem("list ", int{size_class}, "/", int{flag}, ": broken at ", id);
                return;
            }
            const Entry& entry = pool_.entries_[id];
            if ((entry.flags & kInList) != flag || entry.size_class != size_class ||
                pool_.notes_[id].owner != owner) {
                problem("entry ", id, ": in a list that is not its own");
            }
            if (entry.last_use() > use) {
                problem("entry ", id, ": younger than the entries before it");
            }
            use = entry.last_use();
            before = id;
        }
        if (size != list.size || list.tail != before) {
            problem("list ", int{size_class}, "/", int{flag}, ": size or tail is wrong");
        }
    }

    void check_owners() {
        for (uint32_t row = 0; row < pool_.owners_.end(); ++row) {
            const Owner& counted = pool_.owners_.at(row);
            if (counted.entries != owners_[row].entries || counted.units != owners_[row].units) {
                problem("owner ", row, ": ", owners_[row].entries, " entries, ", counted.entries,
                        " counted");
            }
        }
        if (pinned_soft_ != pool_.pinned_soft_ || pinned_hard_ != pool_.pinned_hard_) {
            problem("pins: ", pinned_soft_, " and ", pinned_hard_, " entries, ", pool_.pinned_soft_,
                    " and ", pool_.pinned_hard_, " counted");
        }
    }

    void check_slabs() {
        uint64_t free_slabs = 0;
        for (size_t i = 0; i < tallies_.size(); ++i) {
            const Slab& slab = pool_.slabs_.all()[i];
            const SlabTally& tally = tallies_[i];
            if (slab.used != tally.used || slab.listed != tally.listed ||
                slab.listed_safe != tally.listed_safe || slab.listed_soft != tally.listed_soft ||
                slab.newest_use < tally.newest_use) {
                problem("slab ", i, ": its counters differ from its entries");
            }
            free_slabs += slab.size_class == kNoClass ? 1 : 0;
            if ((slab.size_class == kNoClass) != (slab.used == 0)) {
                problem("slab ", i, ": empty, but still in a class");
            }
            uint64_t chained = 0;
            for (uint32_t slot = slab.free_slot; slot != kNone; ++chained) {
                if (slot >= slab.owners.size() || (slab.owners[slot] & Slabs::kFreeSlot) == 0 ||
                    chained > slab.owners.size()) {
                    problem("slab ", i, ": its free chain is broken at ", slot);
                    break;
                }
                const uint32_t next = slab.owners[slot];
                slot = next == kNone ? kNone : next & ~Slabs::kFreeSlot;
            }
            if (slab.used + chained != slab.owners.size()) {
                problem("slab ", i, ": ", chained, " free slots chained");
            }
        }
        if (free_slabs != pool_.slabs_.free_slabs()) {
            problem("slabs: ", free_slabs, " are free, ", pool_.slabs_.free_slabs(), " counted");
        }
    }

    void check_counters() {
        for (size_t state = 0; state < states_.size(); ++state) {
            if (states_[state] != pool_.counts_[state]) {
                problem("counters: ", states_[state], " entries in state ", state, ", ",
                        pool_.counts_[state], " counted");
            }
        }
        if (leased_ != pool_.leased_) {
            problem("counters: ", leased_, " leased entries, ", pool_.leased_, " counted");
        }
        uint64_t used = 0;
        for (uint8_t c = 0; c < kClassesMax; ++c) {
            used += pool_.slabs_.in_class(c).used;
        }
        if (used != entry_count_ - states_[static_cast<size_t>(EntryState::kFree)]) {
            problem("classes: ", used, " slots in use, which differs from the entries in use");
        }
    }

    const Pool& pool_;
    uint64_t entry_count_;
    uint64_t leased_ = 0;
    std::array<uint64_t, 4> states_{};
    std::array<Owner, kOwnersMax> owners_{};
    uint64_t pinned_soft_ = 0;
    uint64_t pinned_hard_ = 0;
    std::vector<SlabTally> tallies_;
    std::vector<std::string> problems_;
};

std::vector<std::string> Pool::check() const {
    return PoolChecker(*this).run();
}

}  // namespace kvferry
