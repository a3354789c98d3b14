// From rows of codes to tiles of 32 output channels.  Channels beyond the last are zeros.
#pragma once
#include "product.h"

namespace pl {

// Bytes of `width` for each of `inputs` inputs of each channel, put side by side: [tile][inputs / step][32][step].
template <class T, class Get>
inline void pack_tiles(T* to, int outs, int ins, int step, Get get) {
  for (int tile = 0; tile < padded(outs, PL_TILE) / PL_TILE; tile++)
    for (int k = 0; k < ins; k += step)
      for (int c = 0; c < PL_TILE; c++)
        for (int i = 0; i < step; i++) *to++ = get(tile * PL_TILE + c, k + i);
}

}  // namespace pl

extern "C" {

int64_t pl_packed_bytes(int32_t form, int32_t outs, int32_t ins, int32_t group, int32_t asymmetric) {
  return pl::padded(outs, PL_TILE) / PL_TILE * pl::tile_bytes(form, ins, group, asymmetric != 0);
}

void pl_pack_int8(uint8_t* to, const int8_t* codes, int32_t outs, int32_t ins) {
  pl::pack_tiles(to, outs, ins, 4, [=](int channel, int k) {
    return static_cast<uint8_t>((channel < outs ? codes[static_cast<int64_t>(channel) * ins + k] : 0) + 128);
  });
}

void pl_pack_bf16(uint8_t* to, const uint16_t* values, int32_t outs, int32_t ins) {
  pl::pack_tiles(reinterpret_cast<uint16_t*>(to), outs, ins, 2, [=](int channel, int k) {
    return channel < outs ? values[static_cast<int64_t>(channel) * ins + k] : uint16_t{0};
  });
}

void pl_pack_int4(uint8_t* to, const int8_t* codes, const uint16_t* scales_f16, const int16_t* zeros, int32_t outs,
                  int32_t ins, int32_t group) {
  const int groups = ins / group;
  for (int tile = 0; tile < pl::padded(outs, PL_TILE) / PL_TILE; tile++)
    for (int g = 0; g < groups; g++) {
      auto code = [&](int c, int k) {
        const int channel = tile * PL_TILE + c;
        return channel < outs ? codes[static_cast<int64_t>(channel) * ins + g * group + k] + 8 : 8;
      };
      for (int k = 0; k < group; k += 8)
        for (int c = 0; c < PL_TILE; c++)
          for (int i = 0; i < 4; i++) *to++ = static_cast<uint8_t>(code(c, k + i) | (code(c, k + 4 + i) << 4));
      for (int c = 0; c < PL_TILE; c++, to += 2) {
        const int channel = tile * PL_TILE + c;
        const uint16_t scale = channel < outs ? scales_f16[static_cast<int64_t>(channel) * groups + g] : uint16_t{0};
        std::memcpy(to, &scale, 2);
      }
      if (zeros == nullptr) continue;
      for (int c = 0; c < 2 * PL_TILE; c++) {  // 32 zero points, and as many bytes to keep the next tile aligned
        const int channel = tile * PL_TILE + c;
        *to++ = c < PL_TILE && channel < outs
                    ? static_cast<uint8_t>(zeros[static_cast<int64_t>(channel) * groups + g] + 8)
                    : uint8_t{8};
      }
    }
}

}  // extern "C"
