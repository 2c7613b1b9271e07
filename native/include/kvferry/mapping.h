// A peer's memory, mapped from a descriptor it passed.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>

namespace kvferry {

// Read-write, shared, kept out of core dumps. The descriptor may be closed once this exists.
//
// A peer that shrinks its file would turn our next access into SIGBUS, so a memfd is taken only
// with F_SEAL_SHRINK. Files of a mounted tmpfs cannot be sealed; they are taken as they are, and
// sealed() tells the caller, who decides whom to trust.
class Mapping {
  public:
    // `ahead`: a thread maps all pages meanwhile, in batches, where the first copies would fault
    // them in one by one; only of a file whose pages are all there.
    // Throws std::invalid_argument (not a plain file, too small, not sealed) or std::system_error.
    Mapping(int fd, uint64_t total_bytes, bool ahead = false);
    ~Mapping();
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    // Begins to unmap, by a thread where it takes long (59 ms per GiB of 4 KiB pages, and the pages
    // of a peer that died are freed with their last mapping); returns whether nothing is mapped any
    // more: ask again until then. Nobody may use the memory from the first call on.
    bool let_go() noexcept;

    std::byte* data() const noexcept { return data_; }
    uint64_t total_bytes() const noexcept { return total_bytes_; }
    bool sealed() const noexcept { return sealed_; }

    // Atomic acquire load of an aligned word. Throws std::invalid_argument when it is not aligned
    // or not inside.
    uint64_t load_u64(uint64_t offset) const;

  private:
    void populate_ahead() noexcept;
    void join() noexcept;

    std::byte* data_ = nullptr;
    uint64_t total_bytes_ = 0;
    bool sealed_ = false;
    bool leaving_ = false;
    std::atomic<bool> unmapped_ = false;
    std::jthread thread_;  // maps the pages ahead, and unmaps them in the end
};

}  // namespace kvferry
