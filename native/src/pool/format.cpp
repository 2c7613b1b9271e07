#include <cstring>

#include "kvferry/crc32c.h"
#include "kvferry/pool_format.h"

namespace kvferry {
namespace {

constexpr uint64_t round_up(uint64_t value, uint64_t unit) {
    return (value + unit - 1) / unit * unit;
}

[[noreturn]] void refuse(const std::string& what) {
    throw std::invalid_argument(what);
}

void check_sizes(uint64_t slab_bytes, uint64_t keys_max) {
    constexpr uint64_t kSlabBytesMax = 4ull << 30;
    if (slab_bytes == 0 || slab_bytes % kPageBytes != 0 || slab_bytes > kSlabBytesMax) {
        refuse("slab_bytes is " + std::to_string(slab_bytes) +
               ": it must be a multiple of 4096 up to 4 GiB");
    }
    if (keys_max == 0 || keys_max > kKeysMax) {
        refuse("keys_max is " + std::to_string(keys_max) + ": it must be 1 .. " +
               std::to_string(kKeysMax));
    }
}

// Everything but the sizes that depend on the segment's end.
SegmentLayout plan_index(uint64_t slab_bytes, uint64_t keys_max) {
    SegmentLayout layout{};
    layout.slab_bytes = slab_bytes;
    layout.keys_max = keys_max;
    layout.entries_at = kPageBytes;
    layout.links_at = layout.entries_at + keys_max * sizeof(Entry);
    layout.notes_at = layout.links_at + keys_max * sizeof(Links);
    layout.arena_at = round_up(layout.notes_at + keys_max * sizeof(Note), kArenaAlign);
    return layout;
}

uint32_t header_checksum(const Header& header) {
    return crc32c(&header, offsetof(Header, checksum));
}

}  // namespace

uint64_t segment_bytes_for(uint64_t arena_bytes, uint64_t slab_bytes, uint64_t keys_max) {
    check_sizes(slab_bytes, keys_max);
    if (arena_bytes == 0 || arena_bytes > kUnitBytes << 32) {
        refuse("arena_bytes is " + std::to_string(arena_bytes) + ": it must be 1 .. 2 TiB");
    }
    const uint64_t arena_at = plan_index(slab_bytes, keys_max).arena_at;
    return arena_at + round_up(arena_bytes, slab_bytes);
}

SegmentLayout plan_segment(uint64_t segment_bytes, uint64_t slab_bytes, uint64_t keys_max) {
    check_sizes(slab_bytes, keys_max);
    SegmentLayout layout = plan_index(slab_bytes, keys_max);
    layout.segment_bytes = segment_bytes;
    if (segment_bytes < layout.arena_at + slab_bytes) {
        refuse("segment_bytes is " + std::to_string(segment_bytes) + ": the index of " +
               std::to_string(keys_max) + " keys and one slab take " +
               std::to_string(layout.arena_at + slab_bytes) +
               "; size it with Pool.segment_bytes_for");
    }
    layout.slabs = (segment_bytes - layout.arena_at) / slab_bytes;
    if (layout.slabs * (slab_bytes / kUnitBytes) > (1ull << 32)) {
        refuse("segment_bytes is " + std::to_string(segment_bytes) +
               ": the arena may hold 2 TiB at most");
    }
    return layout;
}

void seal_header(Header& header, const SegmentLayout& layout) {
    header.format_version = kFormatVersion;
    header.header_bytes = sizeof(Header);
    header.layout = layout;
    header.clean = 0;
    header.classes.fill(0);
    header.owners.fill(OwnerRow{});
    Header finished = header;
    finished.magic = kMagic;
    header.checksum = header_checksum(finished);
    publish_fence();
    header.magic = kMagic;
}

void validate_header(const Header& header, uint64_t file_bytes) {
    if (header.magic != kMagic) {
        throw PoolFormatError("no pool: the magic differs");
    }
    if (header.format_version != kFormatVersion) {
        throw PoolFormatError("pool of format version " + std::to_string(header.format_version) +
                              ", this build reads " + std::to_string(kFormatVersion));
    }
    if (header.header_bytes != sizeof(Header) || header.checksum != header_checksum(header)) {
        throw PoolFormatError("damaged pool header: its checksum differs");
    }
    const SegmentLayout& stored = header.layout;
    if (stored.segment_bytes != file_bytes) {
        throw PoolFormatError("the segment has " + std::to_string(file_bytes) +
                              " bytes, its header says " + std::to_string(stored.segment_bytes));
    }
    try {
        if (plan_segment(file_bytes, stored.slab_bytes, stored.keys_max) == stored) {
            return;
        }
    } catch (const std::invalid_argument& error) {
        throw PoolFormatError(std::string("impossible pool header: ") + error.what());
    }
    throw PoolFormatError("impossible pool header: its offsets differ from its sizes");
}

uint64_t encode_class(uint32_t units) {
    return units | (static_cast<uint64_t>(~units) << 32);
}

uint32_t decode_class(uint64_t word) {
    const auto units = static_cast<uint32_t>(word);
    return static_cast<uint32_t>(word >> 32) == ~units ? units : 0;
}

}  // namespace kvferry
