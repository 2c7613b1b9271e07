// Python's view of the pool, the key mix and the checksum (kvferry_native/_native.pyi).
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <system_error>
#include <utility>

#include "kvferry/crc32c.h"
#include "kvferry/key_mix.h"
#include "kvferry/pool.h"
#include "read_buffer.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using kvferry::KeyView;
using kvferry::Pool;

// Arrays are taken as they are: a silent conversion would hide a caller's mistake, so each of
// these arguments is declared noconvert.
using Keys =
    nb::ndarray<const uint8_t, nb::shape<-1, kvferry::kKeyBytes>, nb::c_contig, nb::device::cpu>;
using Words = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

KeyView view(const Keys& keys) {
    return {keys.data(), keys.shape(0)};
}
Pool::Ids span(const Words& words) {
    return {words.data(), words.shape(0)};
}

// A numpy array that owns its memory.
template <class T>
class NewArray {
  public:
    explicit NewArray(size_t size) : data_(new T[size == 0 ? 1 : size]), size_(size) {}
    T* data() { return data_.get(); }
    nb::ndarray<nb::numpy, T, nb::ndim<1>> take() {
        T* data = data_.get();
        nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
        data_.release();
        return {data, {size_}, owner};
    }

  private:
    std::unique_ptr<T[]> data_;
    size_t size_;
};

// What Python holds: close() ends the mapping while the object may live on.
class PyPool {
  public:
    explicit PyPool(std::unique_ptr<Pool> pool) : pool_(std::move(pool)) {}
    Pool& get() {
        if (!pool_) {
            throw std::invalid_argument("the pool is closed");
        }
        return *pool_;
    }
    void close() {
        if (pool_) {
            pool_->mark_clean();
            pool_.reset();
        }
    }

  private:
    std::unique_ptr<Pool> pool_;
};

constexpr size_t kUnlockBytes = 16u << 10;  // below, giving the GIL away costs more than it gives

uint32_t py_crc32c(nb::handle data, uint32_t seed) {
    const ReadBuffer buffer(data);
    if (buffer.size() < kUnlockBytes) {
        return kvferry::crc32c(buffer.data(), buffer.size(), seed);
    }
    const nb::gil_scoped_release unlocked;  // threads verify what they read from slower tiers
    return kvferry::crc32c(buffer.data(), buffer.size(), seed);
}

nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>> py_mix_keys(nb::bytes name_space, uint32_t group,
                                                         uint32_t end_kind, nb::handle hashes,
                                                         size_t hash_bytes, size_t first,
                                                         size_t step) {
    const ReadBuffer buffer(hashes);
    if (name_space.size() != kvferry::kKeyBytes) {
        throw std::invalid_argument("namespace has " + std::to_string(name_space.size()) +
                                    " bytes: it must have 16");
    }
    if (hash_bytes == 0 || hash_bytes > kvferry::kHashBytesMax || buffer.size() % hash_bytes != 0) {
        throw std::invalid_argument("hashes: " + std::to_string(buffer.size()) +
                                    " bytes are no whole number of hashes of " +
                                    std::to_string(hash_bytes) + " bytes (1 .. 1024)");
    }
    if (step == 0) {
        throw std::invalid_argument("step is 0: it must be at least 1");
    }
    const kvferry::MixInput input{.name_space = static_cast<const std::byte*>(name_space.data()),
                                  .group = group,
                                  .end_kind = end_kind,
                                  .hashes = buffer.data(),
                                  .total = buffer.size() / hash_bytes,
                                  .hash_bytes = hash_bytes,
                                  .first = first,
                                  .step = step};
    const size_t count = kvferry::mixed_count(input);
    auto keys = std::make_unique_for_overwrite<uint8_t[]>(count * kvferry::kKeyBytes + 1);
    kvferry::mix_keys(input, reinterpret_cast<std::byte*>(keys.get()));
    nb::capsule owner(keys.get(), [](void* p) noexcept { delete[] static_cast<uint8_t*>(p); });
    return {keys.release(), {count, kvferry::kKeyBytes}, owner};
}

PyPool* py_create(int fd, uint64_t segment_bytes, uint64_t slab_bytes, uint64_t keys_max,
                  uint64_t epoch, int threads) {
    const nb::gil_scoped_release unlocked;  // touching the pages takes seconds
    return new PyPool(Pool::create(fd, segment_bytes, slab_bytes, keys_max, epoch, threads));
}

PyPool* py_attach(int fd, uint64_t epoch) {
    const nb::gil_scoped_release unlocked;
    return new PyPool(Pool::attach(fd, epoch));
}

auto py_present(PyPool& self, const Keys& keys) {
    NewArray<bool> out(keys.shape(0));
    self.get().present(view(keys), out.data());
    return out.take();
}

double absence_of(const Pool& pool, const kvferry::Key& key) {
    if (pool.being_written(key)) {
        return -2.0;
    }
    const int64_t age_ms = pool.evicted_age_ms(key);
    return age_ms < 0 ? -1.0 : static_cast<double>(age_ms) / 1e3;
}

std::pair<size_t, double> py_run(PyPool& self, nb::handle keys) {
    const ReadBuffer buffer(keys);
    const KeyView found(buffer.data(), buffer.size() / kvferry::kKeyBytes);
    const Pool& pool = self.get();
    const size_t run = pool.prefix(found);
    return {run, run < found.size() ? absence_of(pool, found[run]) : -1.0};
}

bool py_unheard_of(PyPool& self, nb::handle keys) {
    const ReadBuffer buffer(keys);
    const KeyView found(buffer.data(), std::min<size_t>(buffer.size() / kvferry::kKeyBytes, 1));
    const Pool& pool = self.get();
    return found.size() == 1 && pool.prefix(found) == 0 && absence_of(pool, found[0]) == -1.0;
}

auto py_residence(PyPool& self) {
    const kvferry::Histogram& seconds = self.get().residence();
    return std::make_tuple(seconds.bounds(), seconds.counts(), seconds.sum());
}

nb::bytes py_take_evicted(PyPool& self) {
    const std::vector<kvferry::Key> keys = self.get().take_evicted();
    return nb::bytes(keys.data(), keys.size() * kvferry::kKeyBytes);
}

auto py_lease(PyPool& self, const Keys& keys, bool use) {
    const std::vector<uint32_t> ids = self.get().lease(view(keys), use);
    NewArray<uint32_t> out(ids.size());
    std::copy(ids.begin(), ids.end(), out.data());
    return out.take();
}

auto py_reserve(PyPool& self, const Keys& keys, uint64_t payload_bytes, uint32_t shards,
                nb::bytes owner, uint64_t quota_bytes, uint16_t group) {
    if (owner.size() != kvferry::kKeyBytes && owner.size() != 0) {
        throw std::invalid_argument("owner has " + std::to_string(owner.size()) +
                                    " bytes: it must have 16, or none");
    }
    kvferry::OwnerOf of{.quota_bytes = quota_bytes, .group = group};
    std::memcpy(&of.name, owner.c_str(), owner.size());
    NewArray<int64_t> out(keys.shape(0));
    self.get().reserve(view(keys), payload_bytes, shards, out.data(), of);
    return out.take();
}

void py_pin(PyPool& self, const Words& entries, uint32_t level) {
    if (level > static_cast<uint32_t>(kvferry::Pin::kHard)) {
        throw std::invalid_argument("level is " + std::to_string(level) +
                                    ": it must be 0 (not pinned), 1 (soft) or 2 (hard)");
    }
    self.get().pin(span(entries), static_cast<kvferry::Pin>(level));
}

auto py_scan(PyPool& self, uint64_t first, uint64_t count) {
    std::vector<kvferry::Seen> seen;
    const uint64_t next = self.get().scan(first, count, &seen);
    const size_t n = seen.size();
    NewArray<uint32_t> entries(n), owners(n), groups(n), ages_s(n);
    NewArray<uint64_t> bytes(n);
    NewArray<uint8_t> keys(n * kvferry::kKeyBytes), pins(n);
    for (size_t i = 0; i < n; ++i) {
        entries.data()[i] = seen[i].id;
        owners.data()[i] = seen[i].owner;
        groups.data()[i] = seen[i].group;
        ages_s.data()[i] = seen[i].age_s;
        bytes.data()[i] = seen[i].bytes;
        pins.data()[i] = static_cast<uint8_t>(seen[i].pin);
        std::memcpy(keys.data() + i * kvferry::kKeyBytes, &seen[i].key, kvferry::kKeyBytes);
    }
    return std::make_tuple(next, entries.take(), keys.take(), owners.take(), groups.take(),
                           ages_s.take(), bytes.take(), pins.take());
}

auto py_holdings(PyPool& self) {
    std::vector<std::tuple<uint32_t, nb::bytes, uint64_t, uint64_t>> found;
    for (const kvferry::Holding& one : self.get().holdings()) {
        found.emplace_back(one.owner, nb::bytes(&one.name, kvferry::kKeyBytes), one.entries,
                           one.bytes);
    }
    return found;
}

auto py_payload_offsets(PyPool& self, const Words& entries) {
    NewArray<uint64_t> out(entries.shape(0));
    self.get().payload_offsets(span(entries), out.data());
    return out.take();
}

void py_set_crcs(PyPool& self, const Words& entries, uint32_t shard, const Words& crcs) {
    if (entries.shape(0) != crcs.shape(0)) {
        throw std::invalid_argument("set_crcs: " + std::to_string(entries.shape(0)) +
                                    " entries, but " + std::to_string(crcs.shape(0)) + " crcs");
    }
    self.get().set_crcs(span(entries), shard, crcs.data());
}

auto py_crcs(PyPool& self, const Words& entries, uint32_t shard) {
    NewArray<uint32_t> out(entries.shape(0));
    NewArray<bool> stored(entries.shape(0));
    self.get().crcs(span(entries), shard, out.data(), stored.data());
    return std::make_tuple(out.take(), stored.take());
}

auto py_seeds(PyPool& self, const Words& entries) {
    NewArray<uint32_t> out(entries.shape(0));
    self.get().seeds(span(entries), out.data());
    return out.take();
}

auto py_recovered(PyPool& self) {
    const kvferry::Recovered& found = self.get().recovered();
    return std::make_tuple(found.kept, found.freed, found.dropped);
}

void translate_system_error(const std::exception_ptr& error, void*) {
    try {
        std::rethrow_exception(error);
    } catch (const std::system_error& known) {
        const std::string text = std::string(known.what());
        const nb::object args = nb::make_tuple(known.code().value(), text);
        PyErr_SetObject(PyExc_OSError, args.ptr());
    }
}

void bind_stats(nb::module_& m) {
    using kvferry::PoolStats;
    nb::class_<PoolStats>(m, "PoolStats")
        .def_ro("total_bytes", &PoolStats::total_bytes)
        .def_ro("used_bytes", &PoolStats::used_bytes)
        .def_ro("ready", &PoolStats::ready)
        .def_ro("writing", &PoolStats::writing)
        .def_ro("doomed", &PoolStats::doomed)
        .def_ro("leased", &PoolStats::leased)
        .def_ro("keys_max", &PoolStats::keys_max)
        .def_ro("evictions", &PoolStats::evictions)
        .def_ro("dropped_before_reuse", &PoolStats::dropped_before_reuse)
        .def_ro("slabs", &PoolStats::slabs)
        .def_ro("slabs_free", &PoolStats::slabs_free)
        .def_ro("quota_evictions", &PoolStats::quota_evictions)
        .def_ro("pinned_soft", &PoolStats::pinned_soft)
        .def_ro("pinned_hard", &PoolStats::pinned_hard)
        .def_ro("pinned_hard_bytes", &PoolStats::pinned_hard_bytes);
}

void bind_lookups(nb::class_<PyPool>& pool) {
    pool.def_prop_ro("address",
                     [](PyPool& self) { return reinterpret_cast<uintptr_t>(self.get().base()); })
        .def_prop_ro("slab_bytes", [](PyPool& self) { return self.get().layout().slab_bytes; })
        .def_prop_ro("recovered", &py_recovered)
        .def_prop_ro("was_clean", [](PyPool& self) { return self.get().recovered().clean; })
        .def("stats", [](PyPool& self) { return self.get().stats(); })
        .def(
            "prefix", [](PyPool& self, const Keys& keys) { return self.get().prefix(view(keys)); },
            "keys"_a.noconvert())
        .def(
            "refresh", [](PyPool& self, const Keys& keys) { self.get().refresh(view(keys)); },
            "keys"_a.noconvert())
        .def("present", &py_present, "keys"_a.noconvert())
        .def("run", &py_run, "keys"_a)
        .def("unheard_of", &py_unheard_of, "keys"_a)
        .def("payload_offsets", &py_payload_offsets, "entries"_a.noconvert())
        .def("crcs", &py_crcs, "entries"_a.noconvert(), "shard"_a)
        .def("seeds", &py_seeds, "entries"_a.noconvert())
        .def("scan", &py_scan, "first"_a, "count"_a)
        .def("holdings", &py_holdings)
        .def("residence", &py_residence)
        .def("check", [](PyPool& self) { return self.get().check(); });
}

template <void (Pool::*Method)(Pool::Ids)>
void call(PyPool& self, const Words& entries) {
    (self.get().*Method)(span(entries));
}

void bind_changes(nb::class_<PyPool>& pool) {
    pool.def("lease", &py_lease, "keys"_a.noconvert(), "use"_a = true)
        .def("release", &call<&Pool::release>, "entries"_a.noconvert())
        .def("reserve", &py_reserve, "keys"_a.noconvert(), "payload_bytes"_a, "shards"_a,
             "owner"_a = nb::bytes("", 0), "quota_bytes"_a = 0, "group"_a = 0)
        .def("pin", &py_pin, "entries"_a.noconvert(), "level"_a)
        .def("set_crcs", &py_set_crcs, "entries"_a.noconvert(), "shard"_a, "crcs"_a.noconvert())
        .def("commit", &call<&Pool::commit>, "entries"_a.noconvert())
        .def("abort", &call<&Pool::abort>, "entries"_a.noconvert())
        .def("doom", &call<&Pool::doom>, "entries"_a.noconvert())
        .def("clear", [](PyPool& self) { return self.get().clear(); })
        .def(
            "evict_to",
            [](PyPool& self, uint64_t used_bytes, uint64_t most) {
                return self.get().evict_to(used_bytes, most);
            },
            "used_bytes"_a, "most"_a)
        .def("take_evicted", &py_take_evicted)
        .def("close", &PyPool::close);
}

}  // namespace

void bind_pool(nb::module_& m) {
    m.attr("KEY_BYTES") = kvferry::kKeyBytes;
    m.attr("FORMAT_VERSION") = kvferry::kFormatVersion;
    nb::exception<kvferry::PoolFormatError>(m, "PoolFormatError");
    nb::exception<kvferry::PoolFull>(m, "PoolFull");
    nb::register_exception_translator(translate_system_error);
    m.def("crc32c", &py_crc32c, "data"_a, "seed"_a = 0);
    m.def("mix_keys", &py_mix_keys, "namespace"_a, "group"_a, "end_kind"_a, "hashes"_a,
          "hash_bytes"_a, "first"_a, "step"_a);
    bind_stats(m);
    nb::class_<PyPool> pool(m, "Pool");
    pool.def_static("create", &py_create, "fd"_a, "segment_bytes"_a, "slab_bytes"_a, "keys_max"_a,
                    "epoch"_a, "threads"_a)
        .def_static("attach", &py_attach, "fd"_a, "epoch"_a)
        .def_static("segment_bytes_for", &kvferry::segment_bytes_for, "arena_bytes"_a,
                    "slab_bytes"_a, "keys_max"_a)
        .def_static("own_bytes_for", &kvferry::Buckets::bytes_for, "keys_max"_a);
    bind_lookups(pool);
    bind_changes(pool);
}
