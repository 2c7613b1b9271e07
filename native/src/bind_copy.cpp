// Python side of the copy engine: Mapping, Layout, CopyEngine, Completion.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kvferry/copy_engine.h"
#include "kvferry/layout.h"
#include "kvferry/mapping.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using kvferry::CopyCompletion;
using kvferry::CopyDirection;
using kvferry::CopyEngine;
using kvferry::CopyRequest;

template <class T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class T>
std::span<const T> view(const Array<T>& array) {
    return {array.data(), array.size()};
}

template <class T>
std::vector<T> values(const Array<T>& array) {
    return {array.data(), array.data() + array.size()};
}

template <class T>
std::vector<T> values(const std::optional<Array<T>>& array) {
    return array ? values(*array) : std::vector<T>{};
}

// The copy threads hold the C++ objects only, never Python's: they never need the GIL.
struct PyMapping {
    std::shared_ptr<kvferry::Mapping> native;
};

struct PyLayout {
    std::shared_ptr<const kvferry::Layout> native;
};

struct PyCompletion {
    uint64_t ticket;
    int status;
    uint64_t moved_bytes;
    double seconds;
    int64_t bad_index;
    nb::object crcs;
};

nb::object to_numpy(std::vector<uint32_t> numbers) {
    auto kept = std::make_unique<std::vector<uint32_t>>(std::move(numbers));
    uint32_t* data = kept->data();
    const size_t size = kept->size();
    nb::capsule owner(kept.get(), [](void* vector) noexcept {
        delete static_cast<std::vector<uint32_t>*>(vector);
    });
    kept.release();
    return nb::cast(nb::ndarray<nb::numpy, uint32_t, nb::ndim<1>>(data, {size}, owner));
}

class PyCopyEngine {
  public:
    PyCopyEngine(size_t threads, size_t jobs_max) : native_(threads, jobs_max) {}

    ~PyCopyEngine() { close(); }

    int event_fd() const { return native_.event_fd(); }
    size_t pending() const { return native_.pending(); }
    void cancel(uint64_t ticket) { native_.cancel(ticket); }
    void inject_failures(size_t count) { native_.inject_failures(count); }

    void close() {
        const nb::gil_scoped_release released;
        native_.close();
    }

    void submit(uint64_t ticket, int direction, const PyLayout& layout,
                const Array<int32_t>& blocks, uint64_t pool_address,
                const Array<uint64_t>& pool_offsets, bool crc,
                const std::optional<Array<uint32_t>>& seeds,
                const std::optional<Array<uint32_t>>& expected, nb::object owner,
                uint64_t pool_bytes) {
        if (!owners_.try_emplace(ticket, std::move(owner)).second) {
            throw std::invalid_argument("copy refused: ticket " + std::to_string(ticket) +
                                        " is still pending");
        }
        try {
            const nb::gil_scoped_release released;
            // The arrays are copied: what the caller does to them later changes no running job.
            native_.submit({.ticket = ticket,
                            .direction = static_cast<CopyDirection>(direction),
                            .layout = layout.native,
                            .pool = reinterpret_cast<std::byte*>(pool_address),
                            .pool_bytes = pool_bytes,
                            .blocks = values(blocks),
                            .pool_offsets = values(pool_offsets),
                            .crc = crc,
                            .seeds = values(seeds),
                            .expected = values(expected)});
        } catch (...) {
            owners_.erase(ticket);
            throw;
        }
    }

    nb::list poll() {
        nb::list results;
        std::vector<nb::object> dropped;  // last: a finaliser may call back into this engine
        for (CopyCompletion& done : native_.poll()) {
            const bool with_crcs = !done.crcs.empty();
            results.append(nb::cast(PyCompletion{
                done.ticket, static_cast<int>(done.status), done.moved_bytes, done.seconds,
                done.bad_index, with_crcs ? to_numpy(std::move(done.crcs)) : nb::none()}));
            auto owner = owners_.extract(done.ticket);
            dropped.push_back(std::move(owner.mapped()));
        }
        return results;
    }

  private:
    // Guarded by the GIL. Keeps the pool's memory alive until the completion was collected.
    std::unordered_map<uint64_t, nb::object> owners_;
    CopyEngine native_;
};

void bind_memory(nb::module_& m) {
    nb::class_<PyMapping>(m, "Mapping")
        .def(
            "__init__",
            [](PyMapping* self, int fd, uint64_t total_bytes, bool ahead) {
                new (self) PyMapping{std::make_shared<kvferry::Mapping>(fd, total_bytes, ahead)};
            },
            "fd"_a, "total_bytes"_a, "ahead"_a = false)
        .def_prop_ro(
            "address",
            [](const PyMapping& self) { return reinterpret_cast<uintptr_t>(self.native->data()); })
        .def_prop_ro("total_bytes",
                     [](const PyMapping& self) { return self.native->total_bytes(); })
        .def_prop_ro("sealed", [](const PyMapping& self) { return self.native->sealed(); })
        .def(
            "load_u64",
            [](const PyMapping& self, uint64_t offset) { return self.native->load_u64(offset); },
            "offset"_a)
        .def("let_go", [](const PyMapping& self) {
            return self.native.use_count() == 1 && self.native->let_go();
        });

    nb::class_<PyLayout>(m, "Layout")
        .def(
            "__init__",
            [](PyLayout* self, const PyMapping& mapping, const Array<int64_t>& offsets,
               const Array<int64_t>& strides, const Array<int64_t>& lengths, int64_t num_blocks) {
                new (self) PyLayout{std::make_shared<kvferry::Layout>(
                    mapping.native, view(offsets), view(strides), view(lengths), num_blocks)};
            },
            "mapping"_a, "offsets"_a.noconvert(), "strides"_a.noconvert(), "lengths"_a.noconvert(),
            "num_blocks"_a)
        .def_prop_ro("payload_bytes",
                     [](const PyLayout& self) { return self.native->payload_bytes(); })
        .def_prop_ro("num_runs", [](const PyLayout& self) { return self.native->runs().size(); });
}

void bind_engine(nb::module_& m) {
    nb::class_<PyCompletion>(m, "Completion")
        .def_ro("ticket", &PyCompletion::ticket)
        .def_ro("status", &PyCompletion::status)
        .def_ro("moved_bytes", &PyCompletion::moved_bytes)
        .def_ro("seconds", &PyCompletion::seconds)
        .def_ro("bad_index", &PyCompletion::bad_index)
        .def_ro("crcs", &PyCompletion::crcs);

    nb::class_<PyCopyEngine>(m, "CopyEngine")
        .def(nb::init<size_t, size_t>(), "threads"_a, "jobs_max"_a = CopyEngine::kJobsMax)
        .def_prop_ro("eventfd", &PyCopyEngine::event_fd)
        .def_prop_ro("pending", &PyCopyEngine::pending)
        .def("submit", &PyCopyEngine::submit, "ticket"_a, "direction"_a, "layout"_a,
             "blocks"_a.noconvert(), "pool_address"_a, "pool_offsets"_a.noconvert(), "crc"_a,
             "seeds"_a.noconvert() = nb::none(), "expected"_a.noconvert() = nb::none(),
             "owner"_a = nb::none(), "pool_bytes"_a = 0)
        .def("cancel", &PyCopyEngine::cancel, "ticket"_a)
        .def("poll", &PyCopyEngine::poll)
        .def("close", &PyCopyEngine::close)
        .def("inject_failures", &PyCopyEngine::inject_failures, "count"_a);
}

}  // namespace

void bind_copy(nb::module_& m) {
    nb::register_exception_translator([](const std::exception_ptr& caught, void*) {
        try {
            std::rethrow_exception(caught);
        } catch (const std::system_error& error) {
            const nb::object arguments = nb::make_tuple(error.code().value(), error.what());
            PyErr_SetObject(PyExc_OSError, arguments.ptr());
        }
    });
    m.attr("GATHER") = static_cast<int>(CopyDirection::kGather);
    m.attr("SCATTER") = static_cast<int>(CopyDirection::kScatter);
    bind_memory(m);
    bind_engine(m);
}
