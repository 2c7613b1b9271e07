// What lies in the segment: header | entries | links | notes | arena of slabs.
//
// Crash rules. The owner may be killed at any instruction; its memory stays. Only the header, the
// entries, the notes and the arena are trusted by the next owner; links and everything in its own
// memory (buckets, slab table, lists, counters) are rebuilt from the entries at attach. An entry is
// described by its state alone: it is written while `free` or `writing`, and `ready` is stored
// last. A slot changes hands only after its old entry was stored as `free`. Stores keep that order
// through std::atomic_ref (release) and publish_fence(); the bytes of a payload are written by copy
// threads whose completion happens before the commit.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "kvferry/key_mix.h"

namespace kvferry {

inline constexpr uint32_t kFormatVersion = 4;
inline constexpr std::array<char, 8> kMagic = {'K', 'V', 'F', 'E', 'R', 'R', 'Y', 'P'};
inline constexpr size_t kPageBytes = 4096;
inline constexpr size_t kHugePageBytes = 2u << 20;
inline constexpr size_t kArenaAlign = kHugePageBytes;  // whole ones where the kernel gives them
inline constexpr size_t kUnitBytes = 512;  // of slots: direct I/O needs no bounce buffer
inline constexpr size_t kClassesMax = 64;
inline constexpr size_t kShardsMax = 32;
inline constexpr size_t kOwnersMax = 128;  // row 0 is nobody's
inline constexpr uint64_t kKeysMax = (1ull << 31) - 1;
inline constexpr uint32_t kNone = 0xFFFFFFFF;

enum class EntryState : uint8_t { kFree = 0, kWriting = 1, kReady = 2, kDoomed = 3 };

// Entry::flags
inline constexpr uint8_t kInProbation = 1;
inline constexpr uint8_t kInProtected = 2;
inline constexpr uint8_t kLeasedOnce = 4;
inline constexpr uint8_t kInSoft = 8;  // the list of what is pinned softly
inline constexpr uint8_t kInList = kInProbation | kInProtected | kInSoft;
inline constexpr uint8_t kPinSoft = 16;  // evicted only when nothing else can be
inline constexpr uint8_t kPinHard = 32;  // never evicted: in no list
inline constexpr uint8_t kPins = kPinSoft | kPinHard;

struct Entry {
    Key key;
    uint32_t slot;      // kUnitBytes units from the arena's start
    uint32_t use_low;   // last use, 48 bits of the pool's use counter
    uint16_t use_high;  //
    uint16_t leases;
    uint8_t state;  // EntryState, through load_state and store_state only
    uint8_t flags;
    uint8_t size_class;
    uint8_t shards;

    uint64_t last_use() const { return use_low | (static_cast<uint64_t>(use_high) << 32); }
    void set_last_use(uint64_t use) {
        use_low = static_cast<uint32_t>(use);
        use_high = static_cast<uint16_t>(use >> 32);
    }
    EntryState load_state() const {
        return static_cast<EntryState>(
            std::atomic_ref<uint8_t>(const_cast<uint8_t&>(state)).load(std::memory_order_acquire));
    }
    void store_state(EntryState next) {
        std::atomic_ref<uint8_t>(state).store(static_cast<uint8_t>(next),
                                              std::memory_order_release);
    }
};
static_assert(sizeof(Entry) == 32, "an entry never straddles a cache line");

// Neighbours in an eviction list; `next` chains the free entries.
struct Links {
    uint32_t prev;  // towards the head (most recent)
    uint32_t next;  // towards the tail (evicted first)
};

// What an entry is besides: read when it changes hands and by operators, never by a lookup.
// Written while the entry is `free` or `writing`.
struct Note {
    uint32_t stored_s;  // seconds since 1970 at the commit
    uint16_t owner;     // row of Header::owners
    uint16_t group;     // of the owner's; only told again
};

// Whose entries they are: a namespace. A row that has no entries may be given to another name.
struct OwnerRow {
    Key name;
    uint64_t taken;  // kOwnerTaken once the name is whole
};
inline constexpr uint64_t kOwnerTaken = 0x6F776E6572726F77;

// At the end of every slot.
struct Trailer {
    uint32_t valid_mask;  // bit s: crcs[s] is stored
    uint32_t crcs[kShardsMax];
};

// Where everything is, in bytes from the segment's start.
struct SegmentLayout {
    uint64_t segment_bytes;
    uint64_t slab_bytes;
    uint64_t keys_max;
    uint64_t entries_at;
    uint64_t links_at;
    uint64_t notes_at;
    uint64_t arena_at;
    uint64_t slabs;
    friend bool operator==(const SegmentLayout&, const SegmentLayout&) = default;
};

struct Header {
    std::array<char, 8> magic;  // stored last at create: a half-made pool is no pool
    uint32_t format_version;
    uint32_t header_bytes;
    SegmentLayout layout;
    uint32_t checksum;  // CRC32C of everything above
    uint32_t clean;     // 1 from close() to the next attach
    uint64_t epoch;     // of the last owner
    // Size class -> slot size in units, its complement in the upper half. Written before the first
    // entry of the class.
    std::array<uint64_t, kClassesMax> classes;
    std::array<OwnerRow, kOwnersMax> owners;
};
static_assert(sizeof(Header) <= kPageBytes);

// The segment is not a pool of this format version, or its header is damaged.
class PoolFormatError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// No size class is left (reserve answers a lack of space per key instead).
class PoolFull : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// Keeps the compiler from moving plain stores across it. Enough for kill -9: what a thread has
// retired reaches memory, whatever the order.
inline void publish_fence() {
    std::atomic_signal_fence(std::memory_order_seq_cst);
}

// Bytes of a segment whose arena holds at least `arena_bytes`. Throws std::invalid_argument.
uint64_t segment_bytes_for(uint64_t arena_bytes, uint64_t slab_bytes, uint64_t keys_max);

// The layout of a segment of this size. Throws std::invalid_argument with what does not fit.
SegmentLayout plan_segment(uint64_t segment_bytes, uint64_t slab_bytes, uint64_t keys_max);

void seal_header(Header& header, const SegmentLayout& layout);

// Throws PoolFormatError with what differs from a pool of `file_bytes` bytes.
void validate_header(const Header& header, uint64_t file_bytes);

// Size class words of the header; 0 = unused or damaged.
uint64_t encode_class(uint32_t units);
uint32_t decode_class(uint64_t word);

// Units of a slot for this payload and its trailer.
inline uint64_t slot_units_for(uint64_t payload_bytes) {
    return (payload_bytes + sizeof(Trailer) + kUnitBytes - 1) / kUnitBytes;
}

}  // namespace kvferry
