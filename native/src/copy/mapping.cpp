#include "kvferry/mapping.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>

#include "signals_blocked.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22  // Linux 5.14; older headers lack it
#endif

namespace kvferry {
namespace {

constexpr uint64_t kAheadBytes = 1 << 20;    // who maps or unmaps meanwhile waits for one piece
constexpr uint64_t kAtOnceBytes = 64 << 20;  // unmapped in 4 ms: no thread's worth

// A memfd without sealing and a file of a mounted tmpfs both answer F_SEAL_SEAL; the kernel tells
// them apart only by the name it gives to a memfd.
bool is_memfd(int fd) {
    std::array<char, 64> target{};
    const std::string link = "/proc/self/fd/" + std::to_string(fd);
    const ssize_t length = readlink(link.c_str(), target.data(), target.size());
    return length > 0 &&
           std::string_view(target.data(), static_cast<size_t>(length)).starts_with("/memfd:");
}

bool check_seals(int fd) {
    const int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0) {
        return false;  // EINVAL: a file system without seals
    }
    if ((seals & F_SEAL_WRITE) != 0) {
        throw std::invalid_argument(
            "the memfd is sealed against writing (F_SEAL_WRITE), but loads write into it: "
            "seal it with F_SEAL_SHRINK only");
    }
    if ((seals & F_SEAL_SHRINK) != 0) {
        return true;
    }
    if (is_memfd(fd)) {
        throw std::invalid_argument(
            "the memfd lacks F_SEAL_SHRINK: its owner could shrink it under a running copy; "
            "create it with MFD_ALLOW_SEALING and add F_SEAL_SHRINK after sizing it");
    }
    return false;
}

// Returns whether all pages of the file are there.
bool check_size(int fd, uint64_t total_bytes) {
    struct stat info{};
    if (fstat(fd, &info) != 0) {
        throw std::system_error(errno, std::generic_category(), "cannot stat the descriptor");
    }
    if (!S_ISREG(info.st_mode)) {
        throw std::invalid_argument(
            "the descriptor is not a memfd or a file: only those can be mapped");
    }
    const auto file_bytes = static_cast<uint64_t>(info.st_size);
    if (total_bytes == 0 || file_bytes < total_bytes) {
        throw std::invalid_argument("cannot map " + std::to_string(total_bytes) +
                                    " bytes of a file of " + std::to_string(file_bytes) +
                                    " bytes: size the file before it is passed");
    }
    return static_cast<uint64_t>(info.st_blocks) * 512 >= total_bytes;
}

// In pieces: the whole at once would keep page faults and other mappings waiting.
void unmap_all(std::byte* data, uint64_t total_bytes) noexcept {
    for (uint64_t at = 0; at < total_bytes; at += kAheadBytes) {
        madvise(data + at, std::min(kAheadBytes, total_bytes - at), MADV_DONTNEED);
    }
    munmap(data, total_bytes);
}

// Reading is enough: a page of shared memory is mapped for both at once.
void populate(std::byte* data, uint64_t total_bytes, const std::stop_token& stop) noexcept {
    for (uint64_t at = 0; at < total_bytes && !stop.stop_requested(); at += kAheadBytes) {
        if (madvise(data + at, std::min(kAheadBytes, total_bytes - at), MADV_POPULATE_READ) != 0 &&
            errno != EINTR) {
            return;  // an older kernel: copies will do it, page by page
        }
    }
}

}  // namespace

Mapping::Mapping(int fd, uint64_t total_bytes, bool ahead) : total_bytes_(total_bytes) {
    // The seal first: a size checked before it could still change.
    sealed_ = check_seals(fd);
    const bool whole = check_size(fd, total_bytes);
    void* data = mmap(nullptr, total_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) {
        throw std::system_error(errno, std::generic_category(),
                                "cannot map " + std::to_string(total_bytes) + " bytes read-write");
    }
    data_ = static_cast<std::byte*>(data);
    // Best effort: a kernel that refuses only writes larger core dumps.
    madvise(data, total_bytes, MADV_DONTDUMP);
    // Holes of a file stay holes: pages that we were the first to touch would be charged to us.
    if (ahead && whole) {
        populate_ahead();
    }
}

void Mapping::populate_ahead() noexcept {
    const SignalsBlocked inherited_by_the_thread;
    try {
        thread_ = std::jthread(
            [this](const std::stop_token& stop) { populate(data_, total_bytes_, stop); });
        pthread_setname_np(thread_.native_handle(), "kvferry-ahead");
    } catch (const std::system_error&) {
        // No thread is to be had: copies will do it, page by page.
    }
}

Mapping::~Mapping() {
    join();
    if (unmapped_.load(std::memory_order_acquire)) {
        return;
    }
    if (total_bytes_ > kAtOnceBytes) {  // nobody asks when it is done
        const SignalsBlocked inherited_by_the_thread;
        try {
            std::thread(unmap_all, data_, total_bytes_).detach();
            return;
        } catch (const std::system_error&) {
            // No thread is to be had: the caller waits.
        }
    }
    unmap_all(data_, total_bytes_);
}

bool Mapping::let_go() noexcept {
    if (!leaving_) {
        leaving_ = true;
        join();
        const auto unmap = [this] {
            unmap_all(data_, total_bytes_);
            unmapped_.store(true, std::memory_order_release);
        };
        if (total_bytes_ <= kAtOnceBytes) {
            unmap();
            return true;
        }
        const SignalsBlocked inherited_by_the_thread;
        try {
            thread_ = std::jthread(unmap);
            pthread_setname_np(thread_.native_handle(), "kvferry-unmap");
        } catch (const std::system_error&) {
            unmap();  // no thread is to be had
        }
    }
    return unmapped_.load(std::memory_order_acquire);
}

void Mapping::join() noexcept {
    if (thread_.joinable()) {
        thread_.request_stop();
        thread_.join();
    }
}

uint64_t Mapping::load_u64(uint64_t offset) const {
    if (leaving_) {
        throw std::invalid_argument("the mapping was let go");
    }
    if (offset % sizeof(uint64_t) != 0 || total_bytes_ < sizeof(uint64_t) ||
        offset > total_bytes_ - sizeof(uint64_t)) {
        throw std::invalid_argument("no aligned 8-byte word at offset " + std::to_string(offset) +
                                    " of a mapping of " + std::to_string(total_bytes_) + " bytes");
    }
    return __atomic_load_n(reinterpret_cast<const uint64_t*>(data_ + offset), __ATOMIC_ACQUIRE);
}

}  // namespace kvferry
