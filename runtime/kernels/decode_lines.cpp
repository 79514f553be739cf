// Decodes quantised and packed matrices, and packs matrices of floats, line by line, with one thread. The methods
// `decode` and `encode` of the formulas in models/layouts are the references, bit for bit.
//
// A line is a row of the stored matrix: a row [in] of the matrix, or a column [out] if it is stored transposed.
//
//     code     the stored bits of an element
//     target   quantised: (number of the code - zero point) * scale, rounded once
//              packed: see lossless.py and elf.py

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

// The fields of `_Lines` in cpu_decoder.py, in that order. Strides are in elements.
struct Lines {
  const uint8_t* values;
  const float* scales;  // [matrices, line blocks, element blocks]
  const float* zero_points;  // as scales; null: all are `zero_point`
  const int64_t* line_blocks;  // [matrices, lines]; null: line / line_block
  const int64_t* element_blocks;  // [matrices, length]; null: element / element_block
  const int64_t* order;  // position of each code in a word; null: bytes, the low bits first
  void* target;
  int64_t matrices, lines, length, count_of_line_blocks, count_of_element_blocks, line_block, element_block;
  int64_t bits, is_packed_across, zero_point, matrix_stride, line_stride, element_stride;
};

// The fields of `_Floats` in cpu_decoder.py, in that order. Strides are in elements.
struct Floats {
  const uint8_t* values;
  const uint8_t* sections;  // [matrices, section_bytes]
  void* target;
  int64_t matrices, lines, length, section_bytes, matrix_stride, line_stride, element_stride;
};

// The fields of `_Matrix` in cpu_encoder.py, in that order.
struct Matrix {
  const void* numbers;  // [lines, length]
  uint8_t* values;
  uint8_t* sections;  // as long as they can become
  int64_t lines, length;
};

namespace {

// Lines that are transposed together. 32 elements of two bytes fill a cache line.
constexpr int64_t kTile = 32;

float from_bits(uint32_t bits) {
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

// Numbers of codes as bits of bf16, which represents them exactly. Arithmetic of 16 bits handles twice as many elements
// at once as arithmetic of 32 bits.
struct E4M3 {
  static uint16_t number(uint16_t code) {
    const uint16_t magnitude = code & 127, sign = (code & 128) << 8;
    uint16_t bits = (magnitude << 4) + (120 << 7);
    // Denormals are multiples of 2^-9: 0, 1, 2 and 3, 4 to 7.
    if (magnitude < 8) bits = (magnitude << 5) + (119 << 7);
    if (magnitude < 4) bits = (magnitude << 6) + (118 << 7);
    if (magnitude < 2) bits = magnitude * (118 << 7);
    return (magnitude == 127 ? 0x7fc0 : bits) | sign;
  }
};

struct E2M1 {
  static uint16_t number(uint16_t code) {
    const uint16_t magnitude = code & 7, sign = (code & 8) << 12;
    const uint16_t denormal = magnitude * 0x3f00, normal = (magnitude + 252) << 6;  // 0x3f00 is 0.5.
    return (magnitude < 2 ? denormal : normal) | sign;
  }
};

// Integers are converted by the loop that scales them. Only they have zero points.
struct Integer {};

// GCC vectorises stores of numbers, not of structs.
struct BFloat16 {
  using Stored = uint16_t;
  static Stored of(float number) {
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
};

// GCC has this type from version 12 on, clang from 15 on.
#ifdef __FLT16_MANT_DIG__
struct Half {
  using Stored = _Float16;
  static Stored of(float number) { return static_cast<_Float16>(number); }
};
#endif

struct Single {
  using Stored = float;
  static Stored of(float number) { return number; }
};

// Writes the codes of a line, of `bits` bits each, to `codes`.
void unpack(const Lines& lines, int64_t matrix, int64_t line, uint8_t* codes) {
  const int64_t bits = lines.bits, length = lines.length, count = 32 / bits;
  const uint32_t mask = (1u << bits) - 1;
  if (lines.is_packed_across) {
    const int64_t first = (matrix * (lines.lines / count) + line / count) * length;
    const uint32_t* words = reinterpret_cast<const uint32_t*>(lines.values) + first;
    const int64_t shift = line % count * bits;
    for (int64_t k = 0; k < length; ++k) codes[k] = words[k] >> shift & mask;
    return;
  }
  const uint8_t* bytes = lines.values + (matrix * lines.lines + line) * length * bits / 8;
  if (lines.order) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(bytes);
    uint32_t shifts[8] = {};
    for (int64_t n = 0; n < count; ++n) shifts[n] = lines.order[n] * bits;
    if (count == 8) {
      for (int64_t word = 0; word < length / 8; ++word)
        for (int64_t n = 0; n < 8; ++n) codes[word * 8 + n] = words[word] >> shifts[n] & 15;
    } else {
      for (int64_t word = 0; word < length / count; ++word)
        for (int64_t n = 0; n < count; ++n) codes[word * count + n] = words[word] >> shifts[n] & mask;
    }
  } else if (bits == 8) {
    std::memcpy(codes, bytes, length);
  } else {
    for (int64_t k = 0; k < length / 2; ++k) {
      codes[2 * k] = bytes[k] & 15;
      codes[2 * k + 1] = bytes[k] >> 4;
    }
  }
}

template <int64_t kBlock>
void spread_blocks_of(const float* numbers, int64_t blocks, float* spread) {
  for (int64_t block = 0; block < blocks; ++block)
    for (int64_t k = 0; k < kBlock; ++k) spread[block * kBlock + k] = numbers[block];
}

// Writes the number of each element's block to `spread`.
void spread_blocks(const Lines& lines, int64_t matrix, const float* numbers, float* spread) {
  if (lines.element_blocks) {
    const int64_t* blocks = lines.element_blocks + matrix * lines.length;
    for (int64_t k = 0; k < lines.length; ++k) spread[k] = numbers[blocks[k]];
    return;
  }
  // Blocks of the usual sizes have loops of known lengths.
  int64_t block = 0;
  const int64_t complete = lines.length / lines.element_block;
  if (lines.element_block == 1) spread_blocks_of<1>(numbers, block = complete, spread);
  if (lines.element_block == 16) spread_blocks_of<16>(numbers, block = complete, spread);
  if (lines.element_block == 32) spread_blocks_of<32>(numbers, block = complete, spread);
  for (; block < lines.count_of_element_blocks; ++block) {
    const int64_t start = block * lines.element_block;
    std::fill(spread + start, spread + std::min(start + lines.element_block, lines.length), numbers[block]);
  }
}

// Writes first[0], second[0], first[1], second[1], ... to `target`.
template <typename Stored>
void interleave(const Stored* first, const Stored* second, int64_t count, Stored* __restrict__ target) {
  for (int64_t k = 0; k < count; ++k) {
    target[2 * k] = first[k];
    target[2 * k + 1] = second[k];
  }
}

// Writes the transpose of `source` [rows, columns] to `target` [columns, rows]; rows are at most kTile.
template <typename Stored>
void transpose(
    const Stored* source, int64_t source_stride, int64_t rows, int64_t columns, Stored* target, int64_t target_stride) {
  for (int64_t start = 0; start < columns; start += kTile) {
    const int64_t count = std::min(kTile, columns - start);
    if (rows < kTile || count < kTile) {
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t k = start; k < start + count; ++k)
          target[k * target_stride + row] = source[row * source_stride + k];
      continue;
    }
    // Interleaving the halves of the tile rotates the ten bits of each element's index by one. Five rounds transpose it.
    static_assert(kTile == 32);
    Stored first[kTile * kTile], second[kTile * kTile];
    constexpr int64_t kHalf = kTile / 2;
    for (int64_t row = 0; row < kHalf; ++row)
      interleave(
          source + row * source_stride + start, source + (row + kHalf) * source_stride + start, kTile,
          first + row * 2 * kTile);
    interleave(first, first + kHalf * kTile, kHalf * kTile, second);
    interleave(second, second + kHalf * kTile, kHalf * kTile, first);
    interleave(first, first + kHalf * kTile, kHalf * kTile, second);
    // A line of the target is written once, because lines that are 4096 bytes apart evict each other.
    for (int64_t k = 0; k < kTile; ++k)
      interleave(second + k * kHalf, second + (kTile + k) * kHalf, kHalf, target + (start + k) * target_stride);
  }
}

// Calls `decode_line(line, out)` for all lines of a matrix, each of which writes `length` elements to `out`, in order.
template <typename Stored, typename Matrices, typename DecodeLine>
void write_matrix(const Matrices& matrices, int64_t matrix, DecodeLine decode_line) {
  Stored* target = static_cast<Stored*>(matrices.target) + matrix * matrices.matrix_stride;
  if (matrices.element_stride == 1) {
    for (int64_t line = 0; line < matrices.lines; ++line) decode_line(line, target + line * matrices.line_stride);
    return;
  }
  // Lines of a tile are not a multiple of 4096 bytes apart, because such addresses share a set of the cache.
  const int64_t pitch = matrices.length + kTile;
  std::vector<Stored> tile(kTile * pitch);
  for (int64_t line = 0; line < matrices.lines; ++line) {
    const int64_t row = line % kTile;
    decode_line(line, tile.data() + row * pitch);
    if (row == kTile - 1 || line == matrices.lines - 1)
      transpose(tile.data(), pitch, row + 1, matrices.length, target + line - row, matrices.element_stride);
  }
}

template <typename Number, typename Element>
void decode(const Lines& lines) {
  using Stored = typename Element::Stored;
  const int64_t length = lines.length;
  std::vector<uint8_t> codes(length);
  std::vector<uint16_t> numbers(length);
  std::vector<float> scales(length), zero_points(length, static_cast<float>(lines.zero_point));
  for (int64_t matrix = 0; matrix < lines.matrices; ++matrix) {
    int64_t last_block = -1;
    write_matrix<Stored>(lines, matrix, [&](int64_t line, Stored* out) {
      const int64_t block =
          lines.line_blocks ? lines.line_blocks[matrix * lines.lines + line] : line / lines.line_block;
      if (block != last_block) {
        const int64_t first = (matrix * lines.count_of_line_blocks + block) * lines.count_of_element_blocks;
        spread_blocks(lines, matrix, lines.scales + first, scales.data());
        if (lines.zero_points) spread_blocks(lines, matrix, lines.zero_points + first, zero_points.data());
        last_block = block;
      }
      unpack(lines, matrix, line, codes.data());
      if constexpr (std::is_same_v<Number, Integer>) {
        for (int64_t k = 0; k < length; ++k)
          out[k] = Element::of((static_cast<float>(static_cast<int32_t>(codes[k])) - zero_points[k]) * scales[k]);
      } else {
        for (int64_t k = 0; k < length; ++k) numbers[k] = Number::number(codes[k]);
        for (int64_t k = 0; k < length; ++k)
          out[k] = Element::of(from_bits(static_cast<uint32_t>(numbers[k]) << 16) * scales[k]);
      }
    });
  }
}

template <typename Number>
void decode_as(const Lines& lines, int64_t element) {
  if (element == 0) decode<Number, BFloat16>(lines);
#ifdef __FLT16_MANT_DIG__
  if (element == 1) decode<Number, Half>(lines);
#endif
  if (element == 2) decode<Number, Single>(lines);
}

// The bits of a byte as eight bytes.
constexpr std::array<uint64_t, 256> spread_bits() {
  std::array<uint64_t, 256> spread{};
  for (uint64_t byte = 0; byte < 256; ++byte)
    for (uint64_t bit = 0; bit < 8; ++bit) spread[byte] |= (byte >> bit & 1) << 8 * bit;
  return spread;
}
constexpr std::array<uint64_t, 256> kSpread = spread_bits();

// The function `_checksum` of packed_floats.py.
int64_t checksum(const uint8_t* bytes, int64_t count) {
  constexpr uint64_t kKey = 0x9e3779b97f4a7c15;
  const auto term = [](uint64_t word, uint64_t key) {
    const uint32_t low = static_cast<uint32_t>(word) + static_cast<uint32_t>(key);
    const uint32_t high = static_cast<uint32_t>(word >> 32) + static_cast<uint32_t>(key >> 32);
    return static_cast<uint64_t>(low) * high + word;
  };
  const int64_t words = count / 8;
  uint64_t sum = kKey, key = kKey, last = 0;
  for (int64_t n = 0; n < words; ++n, key += kKey) {
    uint64_t word;
    std::memcpy(&word, bytes + 8 * n, 8);
    sum += term(word, key);
  }
  std::memcpy(&last, bytes + 8 * words, count % 8);
  if (count % 8) sum += term(last, key);
  return static_cast<int64_t>(sum);
}

// Writes the lowest `kCount` bits of 8 * `octets` bytes as bit planes, which `kSpread` turns back into bytes.
template <int kCount>
void write_planes(const uint8_t* bytes, int64_t octets, uint8_t* planes) {
  // The product moves the lowest bit of byte n to bit 56 + n; no two products of single bits meet.
  constexpr uint64_t kLowest = 0x0101010101010101, kFactor = 0x0102040810204080;
  for (int plane = 0; plane < kCount; ++plane) {
    for (int64_t n = 0; n < octets; ++n) {
      uint64_t word;
      std::memcpy(&word, bytes + 8 * n, 8);
      planes[plane * octets + n] = (word >> plane & kLowest) * kFactor >> 56;
    }
  }
}

// Writes the checksum of `count` bytes to `target`.
void write_checksum(const uint8_t* bytes, int64_t count, uint8_t* target) {
  const int64_t sum = checksum(bytes, count);
  std::memcpy(target, &sum, sizeof sum);
}

bool has_checksums(const uint8_t* values, int64_t value_bytes, const uint8_t* sections, int64_t section_bytes) {
  const int64_t sums[2] = {checksum(values, value_bytes), checksum(sections + 16, section_bytes - 16)};
  return std::memcmp(sums, sections, sizeof sums) == 0;
}

// Packed floats with these numbers of bits, stored as integers.
template <int kExponentBits, int kMantissaBits, typename StoredType>
struct FloatBits {
  using Stored = StoredType;
  static constexpr int kExponent = kExponentBits, kMantissa = kMantissaBits;
  static constexpr int kBytes = (kMantissa + 1) / 8, kHighBits = (kMantissa + 1) % 8;
  static constexpr uint32_t kMask = (1u << kMantissa) - 1;

  // Writes the bits of each element's sign and mantissa that fill no byte, from its bit planes.
  static void unpack_high(const uint8_t* planes, int64_t octets, uint64_t* high) {
    if constexpr (kHighBits > 0) {
      std::fill(high, high + octets, 0);
      for (int plane = 0; plane < kHighBits; ++plane)
        for (int64_t n = 0; n < octets; ++n) high[n] |= kSpread[planes[plane * octets + n]] << plane;
    }
  }

  // Returns sign and mantissa of element k of a line.
  static uint32_t fraction(const uint8_t* values, const uint8_t* high, int64_t k) {
    uint32_t bits = values[k * kBytes];
    if constexpr (kBytes == 3) bits |= values[3 * k + 1] << 8 | values[3 * k + 2] << 16;
    if constexpr (kHighBits > 0) bits |= high[k] << 8;
    return bits;
  }

  // Writes sign and mantissa of element k of a line, as `fraction` reads them.
  static void write_fraction(uint32_t bits, uint8_t* values, uint8_t* high, int64_t k) {
    values[k * kBytes] = bits;
    if constexpr (kBytes == 3) {
      values[3 * k + 1] = bits >> 8;
      values[3 * k + 2] = bits >> 16;
    }
    if constexpr (kHighBits > 0) high[k] = bits >> 8;
  }

  static uint32_t sign(Stored bits) { return static_cast<uint32_t>(bits) >> (kMantissa + kExponent); }
};
using BF16 = FloatBits<8, 7, uint16_t>;
using FP16 = FloatBits<5, 10, uint16_t>;
using FP32 = FloatBits<8, 23, uint32_t>;

// Decodes matrices by `decode_matrix(values, sections, matrix)`. Returns the first one without its checksums, or -1.
template <typename Float, typename DecodeMatrix>
int64_t decode_checked(const Floats& floats, DecodeMatrix decode_matrix) {
  const int64_t value_bytes = floats.lines * floats.length * Float::kBytes;
  for (int64_t matrix = 0; matrix < floats.matrices; ++matrix) {
    const uint8_t* values = floats.values + matrix * value_bytes;
    const uint8_t* sections = floats.sections + matrix * floats.section_bytes;
    if (!has_checksums(values, value_bytes, sections, floats.section_bytes)) return matrix;
    decode_matrix(values, sections, matrix);
  }
  return -1;
}

// Calls `visit(k)` for every element k of a line whose code in the three planes is that of an escape.
template <typename Visit>
void each_escape(const uint8_t* planes, int64_t octets, Visit visit) {
  for (int64_t n = 0; n < octets; n += 8) {
    uint64_t bits[3] = {};
    for (int plane = 0; plane < 3; ++plane) {
      const uint8_t* source = planes + plane * octets + n;
      if (n + 8 <= octets)
        std::memcpy(&bits[plane], source, 8);
      else
        std::memcpy(&bits[plane], source, octets - n);
    }
    for (uint64_t left = bits[0] & bits[1] & bits[2]; left; left &= left - 1) visit(8 * n + __builtin_ctzll(left));
  }
}

template <typename Float>
int64_t decode_lossless(const Floats& floats) {
  using Stored = typename Float::Stored;
  constexpr int kPlanes = 3 + Float::kHighBits;
  const int64_t length = floats.length, octets = (length + 7) / 8;
  const int64_t planes_start = 16 + 8 * floats.lines, escapes_start = planes_start + floats.lines * kPlanes * octets;
  std::vector<uint64_t> codes(octets), high(octets);
  const uint8_t* code = reinterpret_cast<const uint8_t*>(codes.data());
  const uint8_t* high_bits = reinterpret_cast<const uint8_t*>(high.data());
  return decode_checked<Float>(floats, [&](const uint8_t* values, const uint8_t* sections, int64_t matrix) {
    write_matrix<Stored>(floats, matrix, [&](int64_t line, Stored* out) {
      const uint8_t* line_values = values + line * length * Float::kBytes;
      const uint8_t* planes = sections + planes_start + line * kPlanes * octets;
      int32_t row[2];  // base and index of the first escape
      std::memcpy(row, sections + 16 + 8 * line, sizeof row);
      for (int64_t n = 0; n < octets; ++n)
        codes[n] = kSpread[planes[n]] | kSpread[planes[octets + n]] << 1 | kSpread[planes[2 * octets + n]] << 2;
      Float::unpack_high(planes + 3 * octets, octets, high.data());
      const auto element = [&](int64_t k, uint32_t exponent) {
        const uint32_t bits = Float::fraction(line_values, high_bits, k);
        const uint32_t sign = bits >> Float::kMantissa << (Float::kMantissa + Float::kExponent);
        return static_cast<Stored>((bits & Float::kMask) | exponent << Float::kMantissa | sign);
      };
      const uint32_t base = row[0];
      for (int64_t k = 0; k < length; ++k) out[k] = element(k, base + code[k]);
      int64_t next = escapes_start + row[1];
      each_escape(planes, octets, [&](int64_t k) {
        if (k < length && next >= escapes_start && next < floats.section_bytes) out[k] = element(k, sections[next]);
        ++next;
      });
    });
  });
}

// The bits of mantissa * 2^-m, which is exact.
uint32_t magnitude_bits(FP32, uint32_t mantissa) {
  const float magnitude = static_cast<float>(static_cast<int32_t>(mantissa)) * (1.0f / (1 << FP32::kMantissa));
  uint32_t bits;
  std::memcpy(&bits, &magnitude, sizeof bits);
  return bits;
}

// In fp32 the exponent is larger by 112, and the mantissa ends with 13 zeros. No magnitude is a denormal.
uint32_t magnitude_bits(FP16, uint32_t mantissa) {
  const float magnitude = static_cast<float>(static_cast<int32_t>(mantissa)) * (1.0f / (1 << FP16::kMantissa));
  uint32_t bits;
  std::memcpy(&bits, &magnitude, sizeof bits);
  return mantissa == 0 ? 0 : (bits >> 13) - (112u << FP16::kMantissa);
}

template <typename Float>
int64_t decode_elf(const Floats& floats) {
  using Stored = typename Float::Stored;
  const int64_t length = floats.length, octets = (length + 7) / 8;
  const int64_t exceptions_start = (16 + floats.lines * Float::kHighBits * octets + 7) / 8 * 8;
  std::vector<uint64_t> high(octets);
  const uint8_t* high_bits = reinterpret_cast<const uint8_t*>(high.data());
  return decode_checked<Float>(floats, [&](const uint8_t* values, const uint8_t* sections, int64_t matrix) {
    write_matrix<Stored>(floats, matrix, [&](int64_t line, Stored* out) {
      const uint8_t* line_values = values + line * length * Float::kBytes;
      Float::unpack_high(sections + 16 + line * Float::kHighBits * octets, octets, high.data());
      for (int64_t k = 0; k < length; ++k) {
        const uint32_t bits = Float::fraction(line_values, high_bits, k);
        const uint32_t sign = bits >> Float::kMantissa << (Float::kMantissa + Float::kExponent);
        out[k] = static_cast<Stored>(magnitude_bits(Float(), bits & Float::kMask) | sign);
      }
    });
    Stored* target = static_cast<Stored*>(floats.target) + matrix * floats.matrix_stride;
    for (int64_t offset = exceptions_start; offset < floats.section_bytes; offset += 8) {
      int32_t index;
      Stored value;
      std::memcpy(&index, sections + offset, sizeof index);
      std::memcpy(&value, sections + offset + 4, sizeof value);
      if (index >= 0 && index < floats.lines * length)
        target[index / length * floats.line_stride + index % length * floats.element_stride] = value;
    }
  });
}

// Returns the first exponent of those `kCodes` successive ones that most of `exponents` have.
template <int kRange, int kCodes>
int32_t base_of(const uint8_t* exponents, int64_t length) {
  // Neighbours count in different tables, because counting the same number twice in a row would wait for memory.
  constexpr int kTables = 4;
  int32_t counts[kTables][kRange] = {};
  int64_t k = 0;
  for (; k + kTables <= length; k += kTables)
    for (int table = 0; table < kTables; ++table) ++counts[table][exponents[k + table]];
  for (; k < length; ++k) ++counts[0][exponents[k]];
  for (int table = 1; table < kTables; ++table)
    for (int n = 0; n < kRange; ++n) counts[0][n] += counts[table][n];
  int32_t sum = 0, most = -1, base = 0;
  for (int n = 0; n < kRange; ++n) {
    sum += counts[0][n];
    if (n >= kCodes) sum -= counts[0][n - kCodes];
    if (n >= kCodes - 1 && sum > most) {
      most = sum;
      base = n - kCodes + 1;
    }
  }
  return base;
}

// Writes the values of a matrix, and its sections without their checksum, but with the 8 bytes that may follow them in
// its place. Returns the bytes of the sections.
template <typename Float>
int64_t encode_lossless(const Matrix& matrix) {
  using Stored = typename Float::Stored;
  constexpr int kPlanes = 3 + Float::kHighBits, kRange = 1 << Float::kExponent, kEscape = 7;
  const int64_t length = matrix.length, octets = (length + 7) / 8;
  uint8_t* planes = matrix.sections + 16 + 8 * matrix.lines;
  uint8_t* const escapes = planes + matrix.lines * kPlanes * octets;
  uint8_t* next = escapes;
  std::vector<uint8_t> exponent_memory(length), code_memory(8 * octets), high_memory(8 * octets);
  // Writes of bytes could change the pointers of vectors, for all that the compiler knows.
  uint8_t* __restrict__ exponents = exponent_memory.data();
  uint8_t* __restrict__ codes = code_memory.data();
  uint8_t* __restrict__ high = high_memory.data();
  for (int64_t line = 0; line < matrix.lines; ++line, planes += kPlanes * octets) {
    const Stored* __restrict__ numbers = static_cast<const Stored*>(matrix.numbers) + line * length;
    uint8_t* __restrict__ values = matrix.values + line * length * Float::kBytes;
    for (int64_t k = 0; k < length; ++k) exponents[k] = numbers[k] >> Float::kMantissa & (kRange - 1);
    for (int64_t k = 0; k < length; ++k)
      Float::write_fraction(
          (numbers[k] & Float::kMask) | Float::sign(numbers[k]) << Float::kMantissa, values, high, k);
    const int32_t row[2] = {base_of<kRange, kEscape>(exponents, length), static_cast<int32_t>(next - escapes)};
    std::memcpy(matrix.sections + 16 + 8 * line, row, sizeof row);
    const uint8_t base = row[0];
    // Exponents below the base become large codes.
    for (int64_t k = 0; k < length; ++k) codes[k] = std::min<uint8_t>(exponents[k] - base, kEscape);
    write_planes<3>(codes, octets, planes);
    write_planes<Float::kHighBits>(high, octets, planes + 3 * octets);
    each_escape(planes, octets, [&](int64_t k) { *next++ = exponents[k]; });
  }
  const int64_t used = next - matrix.sections, least = escapes + 8 - matrix.sections;
  const int64_t end = (std::max(used, least) + 7) / 8 * 8;
  std::fill(next, matrix.sections + end, 0);
  write_checksum(matrix.values, matrix.lines * length * Float::kBytes, matrix.sections);
  std::memset(matrix.sections + 8, 0, 8);
  return end;
}

// The mantissa of |number| + 1, rounded to the nearest even one; larger than all mantissas if |number| rounds to 1 or
// more, for infinities and for NaN.
uint32_t rounded_mantissa(FP32, uint32_t bits) {
  const float sum = from_bits(bits & 0x7fffffff) + 1.0f;
  std::memcpy(&bits, &sum, sizeof bits);
  return bits - 0x3f800000;
}

// Floats from 2^13 on have as many bits behind the point as half floats from 1 on. Denormals become larger numbers,
// which are rounded to 0 as well.
uint32_t rounded_mantissa(FP16, uint16_t half) {
  const float sum = from_bits(((half & 0x7fffu) << 13) + (112u << 23)) + 8192.0f;
  uint32_t bits;
  std::memcpy(&bits, &sum, sizeof bits);
  return bits - 0x46000000;
}

template <typename Float>
int64_t encode_elf(const Matrix& matrix) {
  using Stored = typename Float::Stored;
  const int64_t length = matrix.length, octets = (length + 7) / 8;
  uint8_t* planes = matrix.sections + 16;
  uint8_t* next = matrix.sections + (16 + matrix.lines * Float::kHighBits * octets + 7) / 8 * 8;
  std::fill(planes + matrix.lines * Float::kHighBits * octets, next, 0);
  std::vector<uint32_t> mantissa_memory(length);
  std::vector<uint8_t> high_memory(8 * octets);
  uint32_t* __restrict__ mantissas = mantissa_memory.data();
  uint8_t* __restrict__ high = high_memory.data();
  const auto write_exception = [](int64_t index, Stored bits, uint8_t* target) {
    const uint64_t entry = static_cast<uint32_t>(index) | static_cast<uint64_t>(bits) << 32;
    std::memcpy(target, &entry, sizeof entry);
  };
  for (int64_t line = 0; line < matrix.lines; ++line, planes += Float::kHighBits * octets) {
    const Stored* __restrict__ numbers = static_cast<const Stored*>(matrix.numbers) + line * length;
    uint8_t* __restrict__ values = matrix.values + line * length * Float::kBytes;
    for (int64_t k = 0; k < length; ++k) mantissas[k] = rounded_mantissa(Float(), numbers[k]);
    for (int64_t k = 0; k < length; ++k) {
      const uint32_t mantissa = mantissas[k] > Float::kMask ? 0 : mantissas[k];
      Float::write_fraction(mantissa | Float::sign(numbers[k]) << Float::kMantissa, values, high, k);
    }
    write_planes<Float::kHighBits>(high, octets, planes);
    for (int64_t k = 0; k < length; ++k) {
      if (mantissas[k] <= Float::kMask) continue;
      write_exception(line * length + k, numbers[k], next);
      next += 8;
    }
  }
  write_checksum(matrix.values, matrix.lines * length * Float::kBytes, matrix.sections);
  const Stored first = *static_cast<const Stored*>(matrix.numbers);
  const uint32_t mantissa = rounded_mantissa(Float(), first);
  const uint32_t sign = Float::sign(first) << (Float::kMantissa + Float::kExponent);
  write_exception(
      0, mantissa > Float::kMask ? first : magnitude_bits(Float(), mantissa) | sign, matrix.sections + 8);
  return next - matrix.sections;
}

}  // namespace

extern "C" int64_t encode_floats(const Matrix* matrix, int64_t number, int64_t is_elf) {
  if (is_elf) return number == 1 ? encode_elf<FP16>(*matrix) : encode_elf<FP32>(*matrix);
  if (number == 0) return encode_lossless<BF16>(*matrix);
  if (number == 1) return encode_lossless<FP16>(*matrix);
  return encode_lossless<FP32>(*matrix);
}

// Writes the checksums of the sections of `matrices`, each `section_bytes` long.
extern "C" void seal_sections(uint8_t* sections, int64_t matrices, int64_t section_bytes) {
  for (int64_t matrix = 0; matrix < matrices; ++matrix, sections += section_bytes)
    write_checksum(sections + 16, section_bytes - 16, sections + 8);
}

// Returns the first of `matrices` without its checksums, or -1.
extern "C" int64_t first_damaged(
    const uint8_t* values, const uint8_t* sections, int64_t matrices, int64_t value_bytes, int64_t section_bytes) {
  for (int64_t matrix = 0; matrix < matrices; ++matrix) {
    const uint8_t* own_sections = sections + matrix * section_bytes;
    if (!has_checksums(values + matrix * value_bytes, value_bytes, own_sections, section_bytes)) return matrix;
  }
  return -1;
}

extern "C" int64_t decode_floats(const Floats* floats, int64_t number, int64_t is_elf) {
  if (is_elf) return number == 1 ? decode_elf<FP16>(*floats) : decode_elf<FP32>(*floats);
  if (number == 0) return decode_lossless<BF16>(*floats);
  if (number == 1) return decode_lossless<FP16>(*floats);
  return decode_lossless<FP32>(*floats);
}

extern "C" int64_t has_half() {
#ifdef __FLT16_MANT_DIG__
  return 1;
#else
  return 0;
#endif
}

extern "C" void decode_lines(const Lines* lines, int64_t number, int64_t element) {
  if (number == 0) decode_as<E4M3>(*lines, element);
  if (number == 1) decode_as<E2M1>(*lines, element);
  if (number == 2) decode_as<Integer>(*lines, element);
}
