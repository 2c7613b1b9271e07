// Checksums of memory by address, and where memory is placed.
#include <linux/mempolicy.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "kvferry/checksums.h"
#include "kvferry/crc32c.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <class T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class T>
std::span<const T> view(const Array<T>& array) {
    return {array.data(), array.size()};
}

void check_lengths(const char* call, size_t addresses, size_t sizes, size_t seeds) {
    if (sizes != addresses || seeds != addresses) {
        throw std::invalid_argument(std::string(call) + ": " + std::to_string(addresses) +
                                    " addresses, " + std::to_string(sizes) + " sizes, " +
                                    std::to_string(seeds) + " seeds");
    }
}

std::vector<uint32_t> crc32c_at(const Array<uint64_t>& addresses, const Array<uint64_t>& sizes,
                                const Array<uint32_t>& seeds) {
    const size_t n = addresses.shape(0);
    check_lengths("crc32c_at", n, sizes.shape(0), seeds.shape(0));
    std::vector<uint32_t> found(n);
    const nb::gil_scoped_release unlocked;
    for (size_t i = 0; i < n; ++i) {
        found[i] = kvferry::crc32c(reinterpret_cast<const void*>(addresses.data()[i]),
                                   sizes.data()[i], seeds.data()[i]);
    }
    return found;
}

void begin(kvferry::Checksums& checksums, const Array<uint64_t>& addresses,
           const Array<uint64_t>& sizes, const Array<uint32_t>& seeds) {
    check_lengths("checksums", addresses.shape(0), sizes.shape(0), seeds.shape(0));
    checksums.begin(view(addresses), view(sizes), view(seeds));
}

void place_memory(const std::vector<uint32_t>& nodes, bool interleaved) {
    constexpr uint32_t kNodesMax = 1024;
    constexpr uint32_t kWordBits = 8 * sizeof(unsigned long);
    unsigned long mask[kNodesMax / kWordBits] = {};
    for (const uint32_t node : nodes) {
        if (node >= kNodesMax) {
            throw std::system_error(EINVAL, std::generic_category(), "set_mempolicy");
        }
        mask[node / kWordBits] |= 1ul << (node % kWordBits);
    }
    const long mode = interleaved ? MPOL_INTERLEAVE : MPOL_BIND;
    if (syscall(SYS_set_mempolicy, mode, mask, kNodesMax + 1) != 0) {
        throw std::system_error(errno, std::generic_category(), "set_mempolicy");
    }
}

// What move_pages(2) says without moving any: the node of each page, or a negative errno.
std::vector<int> page_nodes(uint64_t address, uint64_t stride, uint32_t count) {
    constexpr uint32_t kPagesMax = 1u << 16;
    if (count > kPagesMax) {
        throw std::invalid_argument("page_nodes: " + std::to_string(count) + " pages; at most " +
                                    std::to_string(kPagesMax));
    }
    std::vector<void*> pages(count);
    for (uint32_t i = 0; i < count; ++i) {
        pages[i] = reinterpret_cast<void*>(address + i * stride);
    }
    std::vector<int> nodes(count, -1);
    const nb::gil_scoped_release unlocked;
    if (syscall(SYS_move_pages, 0, static_cast<unsigned long>(count), pages.data(), nullptr,
                nodes.data(), 0) != 0) {
        const int error = errno;
        const nb::gil_scoped_acquire locked;
        throw std::system_error(error, std::generic_category(), "move_pages");
    }
    return nodes;
}

}  // namespace

void bind_memory(nb::module_& m) {
    m.def("crc32c_at", &crc32c_at, "addresses"_a.noconvert(), "sizes"_a.noconvert(),
          "seeds"_a.noconvert());
    nb::class_<kvferry::Checksums>(m, "Checksums")
        .def(nb::init<size_t>(), "threads"_a)
        .def("begin", &begin, "addresses"_a.noconvert(), "sizes"_a.noconvert(),
             "seeds"_a.noconvert())
        .def("end", &kvferry::Checksums::end, nb::call_guard<nb::gil_scoped_release>());
    m.def("place_memory", &place_memory, "nodes"_a, "interleaved"_a);
    m.def("page_nodes", &page_nodes, "address"_a, "stride"_a, "count"_a);
}
