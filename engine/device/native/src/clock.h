// The clock that all processes of a host share.
#pragma once
#include <time.h>

#include <cstdint>

namespace pl {

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<int64_t>(t.tv_sec) * 1000000000 + t.tv_nsec;
}

}  // namespace pl
