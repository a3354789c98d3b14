// The vectors of the instruction set that this library is built for: see build.py.
#pragma once
#if PL_AVX512
#include "vectors_avx512.h"
#else
#include "vectors_avx2.h"
#endif
