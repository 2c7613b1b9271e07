// The tests' only framework: stop at the first wrong value and say where.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                         \
    do {                                                                         \
        if (!(condition)) {                                                      \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                        \
        }                                                                        \
    } while (false)

// The statement throws this exception type.
#define CHECK_THROWS(statement, type)                                                          \
    do {                                                                                       \
        bool thrown = false;                                                                   \
        try {                                                                                  \
            statement;                                                                         \
        } catch (const type&) {                                                                \
            thrown = true;                                                                     \
        }                                                                                      \
        if (!thrown) {                                                                         \
            std::fprintf(stderr, "%s:%d: no " #type ": " #statement "\n", __FILE__, __LINE__); \
            std::exit(1);                                                                      \
        }                                                                                      \
    } while (false)
