// Python side of the watchdog.
#include <nanobind/nanobind.h>

#include <chrono>
#include <cstdint>

#include "kvferry/watchdog.h"

namespace nb = nanobind;
using namespace nb::literals;
using kvferry::Watchdog;

void bind_watch(nb::module_& m) {
    nb::class_<Watchdog>(m, "Watchdog")
        .def(
            "__init__",
            [](Watchdog* self, int64_t stall_ms, int exit_code, int dump_signal) {
                new (self) Watchdog({std::chrono::milliseconds(stall_ms), exit_code, dump_signal});
            },
            "stall_ms"_a, "exit_code"_a, "dump_signal"_a = 0)
        .def("beat", &Watchdog::beat)
        .def_prop_ro("gaps", &Watchdog::gaps)
        .def("close", &Watchdog::close, nb::call_guard<nb::gil_scoped_release>());
}
