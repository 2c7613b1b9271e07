// The host pool: one segment, one owner thread. Nothing here blocks or takes a lock; copy threads
// touch payload bytes only. Errors: std::invalid_argument names the first offending argument and
// leaves the pool as it was.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvferry/histogram.h"
#include "kvferry/key_mix.h"
#include "kvferry/pool_buckets.h"
#include "kvferry/pool_format.h"
#include "kvferry/pool_ghosts.h"
#include "kvferry/pool_lists.h"
#include "kvferry/pool_owners.h"
#include "kvferry/pool_segment.h"
#include "kvferry/pool_slabs.h"

namespace kvferry {

inline constexpr int64_t kReserveReady = -1;
inline constexpr int64_t kReserveBusy = -2;     // being written, or doomed and still leased
inline constexpr int64_t kReserveNoSpace = -3;  // nothing evictable is left

// Keys kept for take_evicted(); of a larger eviction the rest is not told.
inline constexpr size_t kEvictedMax = 16384;

struct PoolStats {
    uint64_t total_bytes = 0;
    uint64_t used_bytes = 0;
    uint64_t ready = 0;
    uint64_t writing = 0;
    uint64_t doomed = 0;
    uint64_t leased = 0;  // entries that have a lease
    uint64_t keys_max = 0;
    uint64_t evictions = 0;
    uint64_t dropped_before_reuse = 0;  // evicted and never leased
    uint64_t slabs = 0;
    uint64_t slabs_free = 0;
    uint64_t quota_evictions = 0;  // of evictions: an owner's own, to stay within its quota
    uint64_t pinned_soft = 0;      // entries
    uint64_t pinned_hard = 0;
    uint64_t pinned_hard_bytes = 0;
};

enum class Pin : uint8_t { kNone = 0, kSoft = 1, kHard = 2 };

// Bounds of Pool::residence(), in seconds: up to a week.
inline constexpr std::array kResidenceBoundsS{1.0,      10.0,        60.0,       300.0,
                                              900.0,    3600.0,      4 * 3600.,  12 * 3600.,
                                              86'400.0, 3 * 86'400., 7 * 86'400.};

// Who reserves, how many bytes of slots may be theirs, and which group of theirs it is for. The
// name of zeros is nobody's.
struct OwnerOf {
    Key name{};
    uint64_t quota_bytes = 0;  // 0: no bound
    uint16_t group = 0;
};

// A ready entry as scan() tells it.
struct Seen {
    uint32_t id;
    Key key;
    uint32_t owner;
    uint32_t group;
    uint32_t age_s;  // since its commit
    uint64_t bytes;  // of its slot
    Pin pin;
};

// A row that has entries.
struct Holding {
    uint32_t owner;
    Key name;
    uint64_t entries;
    uint64_t bytes;
};

// What attach() found.
struct Recovered {
    uint64_t kept = 0;     // ready
    uint64_t freed = 0;    // writing or doomed
    uint64_t dropped = 0;  // an impossible slot, an overlap, a key twice
    bool clean = false;    // the last owner closed the pool
};

class Pool {
  public:
    using Ids = std::span<const uint32_t>;

    static std::unique_ptr<Pool> create(int fd, uint64_t segment_bytes, uint64_t slab_bytes,
                                        uint64_t keys_max, uint64_t epoch, int threads);
    static std::unique_ptr<Pool> attach(int fd, uint64_t epoch);
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;
    ~Pool() = default;

    std::byte* base() const { return segment_.base(); }
    const SegmentLayout& layout() const { return layout_; }
    const Recovered& recovered() const { return recovered_; }
    PoolStats stats() const;

    // Lookups. prefix() and present() compare 32 bits of a key and its place: of 10^9 keys
    // that are not there about one is taken for one that is. Everything else compares whole keys,
    // so such a key is found to be absent when it is leased.
    size_t prefix(KeyView keys) const;
    // Marks the leading ready keys recently used, tail first, each in the list it is in. Who saves
    // the continuation of a prefix calls it, or the head would be evicted before its tail.
    void refresh(KeyView keys);
    void present(KeyView keys, bool* out) const;
    // Whether a key is reserved and not committed yet.
    bool being_written(const Key& key) const;

    // Leases the leading ready keys and returns their ids. An entry that has all the leases it can
    // count (65,535) ends the prefix.
    // Without `use` it only keeps them from being evicted, and is no sign of reuse.
    std::vector<uint32_t> lease(KeyView keys, bool use = true);
    // In the order of the prefix: later entries are evicted before earlier ones.
    void release(Ids ids);

    // out[i]: entry id or one of kReserve*. Throws PoolFull when no size class is left. Over its
    // quota an owner's own entries are evicted; where it has none that may be, there is no space.
    void reserve(KeyView keys, uint64_t payload_bytes, uint32_t shards, int64_t* out,
                 const OwnerOf& owner = {});
    void commit(Ids ids);
    void abort(Ids ids);
    void doom(Ids ids);
    // What may be evicted, pinned softly or not; returns how many.
    uint64_t clear();
    // Evicts the least recently used until no more than `used_bytes` are, at most `most` entries;
    // returns how many. What is pinned stays, softly or not.
    uint64_t evict_to(uint64_t used_bytes, uint64_t most);
    // Changes how ready entries are pinned; others are left as they are.
    void pin(Ids ids, Pin level);
    // Appends the ready ones of `count` entries from id `first` on; returns the id to go on with,
    // keys_max at the end.
    uint64_t scan(uint64_t first, uint64_t count, std::vector<Seen>* out) const;
    std::vector<Holding> holdings() const;
    // The keys that were evicted since the last call, at most kEvictedMax, oldest first.
    std::vector<Key> take_evicted() { return std::exchange(evicted_, {}); }
    // How long evicted entries had been ready, by the wall clock's whole seconds.
    const Histogram& residence() const { return residence_s_; }
    // Milliseconds since a key was evicted by this process; -1 where that is not known (any more).
    int64_t evicted_age_ms(const Key& key) const { return ghosts_.age_ms(key); }

    // Of entries in any state but free
    void payload_offsets(Ids ids, uint64_t* out) const;
    void set_crcs(Ids ids, uint32_t shard, const uint32_t* crcs);
    void crcs(Ids ids, uint32_t shard, uint32_t* out, bool* stored) const;
    void seeds(Ids ids, uint32_t* out) const;

    std::vector<std::string> check() const;
    void mark_clean();

  private:
    friend class PoolChecker;  // pool_check.cpp

    // One call of reserve().
    struct Reservation {
        uint8_t size_class;
        uint8_t shards;
        uint16_t owner;
        uint16_t group;
        uint32_t units;
        uint64_t quota_units;  // 0: no bound
        bool may_steal_older = true;
    };

    Pool(Segment segment, const SegmentLayout& layout);
    Header& header() const { return *reinterpret_cast<Header*>(segment_.base()); }

    // pool.cpp
    Entry& known(uint32_t id) const;  // throws unless the id names an entry that is not free
    void require_state(Ids ids, EntryState wanted, const char* verb) const;
    static void require_distinct(Ids ids, const char* verb);
    void touch(Entry& entry);
    void used_at(Entry& entry, uint64_t use);
    void move_state(Entry& entry, EntryState next);
    void free_entry(uint32_t id);
    static uint32_t unix_s();
    static uint32_t age_s(const Note& note, uint32_t now_s);
    static uint8_t list_for(const Entry& entry);
    void count_pin(const Entry& entry, bool more);
    void push_free_id(uint32_t id);
    uint32_t pop_free_id();
    std::vector<uint32_t> find_ready_prefix(KeyView keys) const;
    Trailer& trailer(const Entry& entry) const;

    // pool_reserve.cpp
    std::vector<uint32_t> hold_found(KeyView keys, int64_t* out);
    int64_t reserve_one(const Key& key, Reservation& call);
    uint32_t take_slot(uint32_t id, Reservation& call);
    bool make_way_within_quota(const Reservation& call);
    bool evict_one(uint8_t size_class, bool soft);
    bool evict_anywhere(bool soft);
    bool steal_older_slab(uint8_t size_class);
    bool steal_coldest_slab(bool soft);
    void evict_slab(Slab& slab);
    void evict(uint32_t id);

    // pool_attach.cpp
    void format();
    void recover();
    bool adopt(uint32_t id);
    void relink(const std::vector<uint32_t>& kept);

    Segment segment_;
    SegmentLayout layout_;
    Entry* entries_;
    Links* links_;
    Note* notes_;
    Buckets buckets_;
    Slabs slabs_;
    Owners owners_;
    Lists lists_;
    uint32_t free_id_ = kNone;  // chain through links
    uint64_t use_ = 0;          // the use counter
    uint64_t counts_[4] = {};   // entries by EntryState
    uint64_t leased_ = 0;
    uint64_t evictions_ = 0;
    uint64_t quota_evictions_ = 0;
    uint64_t pinned_soft_ = 0;
    uint64_t pinned_hard_ = 0;
    uint64_t pinned_hard_units_ = 0;
    uint64_t dropped_before_reuse_ = 0;
    Histogram residence_s_{{kResidenceBoundsS.begin(), kResidenceBoundsS.end()}};
    Ghosts ghosts_;
    std::vector<Key> evicted_;
    Recovered recovered_;
};

}  // namespace kvferry
