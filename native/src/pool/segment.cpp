#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "kvferry/pool_format.h"
#include "kvferry/pool_segment.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; older headers lack it
#endif

namespace kvferry {
namespace {

[[noreturn]] void fail(int error, const char* what) {
    throw std::system_error(error, std::generic_category(), what);
}

// 0, or the errno. The caller's bytes are kept: a page is touched by an atomic or of nothing.
int populate_range(std::byte* from, uint64_t bytes) {
    int rc;
    do {
        rc = madvise(from, bytes, MADV_POPULATE_WRITE);
    } while (rc != 0 && (errno == EINTR || errno == EAGAIN));
    if (rc == 0) {
        return 0;
    }
    if (errno != EINVAL) {
        return errno;
    }
    for (uint64_t at = 0; at < bytes; at += kPageBytes) {
        std::atomic_ref<uint8_t>(*reinterpret_cast<uint8_t*>(from + at)).fetch_or(0);
    }
    return 0;
}

}  // namespace

Segment::Segment(int fd, uint64_t bytes) : bytes_(bytes) {
    void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED) {
        fail(errno, "mapping the pool segment");
    }
    base_ = static_cast<std::byte*>(mapped);
    madvise(mapped, bytes, MADV_DONTDUMP);
    madvise(mapped, bytes, MADV_HUGEPAGE);  // refused by many kernels: only a matter of speed
}

// Huge pages need an address that is a multiple of theirs, which older kernels do not choose.
Segment Segment::own(uint64_t bytes) {
    bytes = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;  // munmap takes whole pages
    const uint64_t spare = bytes < kHugePageBytes ? 0 : kHugePageBytes;
    void* mapped =
        mmap(nullptr, bytes + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) {
        fail(errno, "mapping the pool's buckets");
    }
    auto* base = static_cast<std::byte*>(mapped);
    if (spare != 0) {
        const uint64_t before = -reinterpret_cast<uintptr_t>(base) % kHugePageBytes;
        if (before != 0) {
            munmap(base, before);
        }
        if (before != spare) {
            munmap(base + before + bytes, spare - before);
        }
        base += before;
    }
    madvise(base, bytes, MADV_DONTDUMP);
    madvise(base, bytes, MADV_HUGEPAGE);
    Segment mine(base, bytes);
    mine.populate(0, bytes, 1);
    return mine;
}

Segment::Segment(Segment&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)), bytes_(other.bytes_) {}

Segment::~Segment() {
    if (base_ != nullptr) {
        munmap(base_, bytes_);
    }
}

uint64_t Segment::file_bytes(int fd) {
    struct stat info;
    if (fstat(fd, &info) != 0) {
        fail(errno, "reading the pool segment's size");
    }
    return static_cast<uint64_t>(info.st_size);
}

void Segment::populate(uint64_t at, uint64_t bytes, int threads) {
    constexpr uint64_t kPieceBytes = 64ull << 20;
    std::atomic<uint64_t> next{0};
    std::atomic<int> error{0};
    const auto work = [&]() noexcept {
        for (;;) {
            const uint64_t piece = next.fetch_add(kPieceBytes);
            if (piece >= bytes || error.load() != 0) {
                return;
            }
            const uint64_t length = std::min(kPieceBytes, bytes - piece);
            if (const int failed = populate_range(base_ + at + piece, length); failed != 0) {
                error.store(failed);
            }
        }
    };
    std::vector<std::jthread> helpers;
    try {
        for (int i = 1; i < threads && static_cast<uint64_t>(i) * kPieceBytes < bytes; ++i) {
            helpers.emplace_back(work);
        }
    } catch (const std::system_error&) {
        // No more threads to be had: the ones there are do all of it.
    }
    work();
    helpers.clear();
    if (error.load() != 0) {
        fail(error.load(), "populating the pool's memory");
    }
}

}  // namespace kvferry
