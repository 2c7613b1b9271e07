// Python's view of what the control loop counts (kvferry_native/_native.pyi).
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kvferry/histogram.h"
#include "kvferry/miss_curve.h"
#include "read_buffer.h"

namespace nb = nanobind;
using namespace nb::literals;
using kvferry::Histogram;
using kvferry::KeyView;
using kvferry::MissCurve;

namespace {

using Told = std::pair<uint64_t, decltype(MissCurve::Tally::missed)>;

Told told(const MissCurve::Tally& tally) {
    return {tally.wanted, tally.missed};
}

KeyView keys_in(const ReadBuffer& buffer) {
    if (buffer.size() % kvferry::kKeyBytes != 0) {
        throw std::invalid_argument("keys: " + std::to_string(buffer.size()) +
                                    " bytes are no whole number of keys of 16 bytes");
    }
    return {buffer.data(), buffer.size() / kvferry::kKeyBytes};
}

// Engines say these numbers, and may say any: none is too large for a double, or refused.
uint64_t tokens(double said) {
    return static_cast<uint64_t>(std::clamp(said, 0.0, 0x1p53));
}

void looked_up(MissCurve& self, nb::handle keys, std::pair<uint64_t, uint64_t> unit,
               std::pair<double, double> span, uint64_t hit_tokens, double now_s) {
    if (unit.first == 0) {
        throw std::invalid_argument("unit: 0 tokens; it must have at least 1");
    }
    const ReadBuffer buffer(keys);
    self.looked_up(keys_in(buffer),
                   {.unit_tokens = unit.first,
                    .unit_bytes = unit.second,
                    .local = tokens(span.first),
                    .wanted = tokens(span.second),
                    .hit = hit_tokens},
                   now_s);
}

void stored(MissCurve& self, nb::handle keys, uint64_t total_bytes) {
    const ReadBuffer buffer(keys);
    self.stored(keys_in(buffer), total_bytes);
}

// What the loop calls several times per message is a plain function of the interpreter's, which it
// calls in a third of the instructions of a method of nanobind's.
PyObject* observe(PyObject* self, PyObject* value) {
    const double number = PyFloat_AsDouble(value);
    if (number == -1.0 && PyErr_Occurred() != nullptr) {
        return nullptr;
    }
    nb::inst_ptr<Histogram>(self)->observe(number);
    Py_RETURN_NONE;
}

template <void (Histogram::*Method)()>
PyObject* call(PyObject* self, PyObject*) {
    (nb::inst_ptr<Histogram>(self)->*Method)();
    Py_RETURN_NONE;
}

// One value for each histogram of a tuple.
PyObject* observe_each(PyObject* histograms, PyObject* const* values, Py_ssize_t count) {
    if (count != PyTuple_GET_SIZE(histograms)) {
        PyErr_SetString(PyExc_TypeError, "as many values as histograms are observed");
        return nullptr;
    }
    for (Py_ssize_t i = 0; i < count; ++i) {
        const nb::object none = nb::steal(observe(PyTuple_GET_ITEM(histograms, i), values[i]));
        if (!none.is_valid()) {
            return nullptr;
        }
    }
    Py_RETURN_NONE;
}

PyMethodDef kObserve = {"observe", observe, METH_O, nullptr};
PyMethodDef kBegin = {"begin", call<&Histogram::begin>, METH_NOARGS, nullptr};
PyMethodDef kEnd = {"end", call<&Histogram::end>, METH_NOARGS, nullptr};

PyMethodDef kObserveEach = {
    "observe_each", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(observe_each)),
    METH_FASTCALL, nullptr};

nb::object observer_of(nb::args histograms) {
    for (const nb::handle one : histograms) {
        if (!nb::isinstance<Histogram>(one)) {
            throw nb::type_error("observer_of takes histograms");
        }
    }
    return nb::steal(PyCFunction_New(&kObserveEach, histograms.ptr()));
}

template <PyMethodDef* Method>
nb::object bound(nb::handle self) {
    return nb::steal(PyCFunction_New(Method, self.ptr()));
}

}  // namespace

void bind_observe(nb::module_& m) {
    nb::class_<MissCurve>(m, "MissCurve")
        .def(nb::init<uint64_t, size_t>(), "pool_bytes"_a, "tracked_max"_a)
        .def("looked_up", &looked_up, "keys"_a, "unit"_a, "span"_a, "hit_tokens"_a, "now_s"_a)
        .def("stored", &stored, "keys"_a, "total_bytes"_a)
        .def_prop_ro("whole", [](const MissCurve& self) { return told(self.whole()); })
        .def_prop_ro("recent", [](const MissCurve& self) { return told(self.recent()); })
        .def_prop_ro("tracked", &MissCurve::tracked)
        .def_prop_ro("uses", &MissCurve::uses)
        .def_prop_ro("sampled", &MissCurve::sampled)
        .def_prop_ro_static("sizes", [](nb::handle) { return MissCurve::kSizes; })
        .def_prop_ro_static("window_s", [](nb::handle) { return MissCurve::kWindowS; });
    nb::class_<Histogram>(m, "Histogram")
        .def(
            "__init__",
            [](Histogram* self, std::vector<double> bounds) {
                if (bounds.empty() || !std::is_sorted(bounds.begin(), bounds.end())) {
                    throw std::invalid_argument("bounds: they must ascend, and be at least one");
                }
                new (self) Histogram(std::move(bounds));
            },
            "bounds"_a)
        .def_prop_ro("observe", &bound<&kObserve>)
        .def_prop_ro("begin", &bound<&kBegin>)
        .def_prop_ro("end", &bound<&kEnd>)
        .def_prop_ro("counts", [](const Histogram& self) { return self.counts(); })
        .def_prop_ro("sum", &Histogram::sum);
    m.def("observer_of", &observer_of, "histograms"_a);
}
