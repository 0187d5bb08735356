// What a rotary embedding makes of positions, a tile at a time: tables that follow from its
// frequencies alone, and the place of an item on its way from tile to tile. Nothing is as long as
// the context.
//
// A sum of waves a cos(n w) + b sin(n w) over the pairs of channels is wanted at the positions of a
// tile. Turned to the middle of the tile, cosines are even and sines odd, so that half of the
// positions give the other half. Pairs are of three kinds, by how far they turn:
//
//   fast     added up at every position
//   slow     added up at NODES places of a tile, from which a polynomial gives the rest
//   slowest  added up at NODES places of a stretch of tiles, from which a polynomial gives what
//            they add at the nodes of each tile
//
// Angles are in double, and turn by products, which err by 2^-53 for each position that is passed:
// by 1e-10 at the millionth.
#pragma once

#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "cpu_few_rows.h"
#include "cpu_softmax.h"

namespace ascend_kv::cpu {

// Chebyshev's places. A polynomial through N of them misses a wave that turns by x from the middle
// to the end by 2 (x / 2)^N / N! at most: by 1e-7 for these.
constexpr int NODES = LANES == 16 ? 16 : 8;
constexpr double NODES_TURN = NODES == 16 ? 4.7 : 0.92;

constexpr int HALF_TILE = TILE / 2;
constexpr int TILE_BIT = 6, STRETCH_BIT = TILE_BIT + 4;
constexpr int STRETCH_TILES = 1 << (STRETCH_BIT - TILE_BIT);
constexpr double TILE_REACH = (TILE - 1) / 2.0;  // from the middle to the last position
constexpr double STRETCH_REACH = ((1 << STRETCH_BIT) - 1) / 2.0;
static_assert(TILE == 1 << TILE_BIT && HALF_TILE % LANES == 0 && NODES % LANES == 0);

// Memory that begins at a cache line, as every vector is to lie in one.
template <class T>
class LinedUp {
 public:
  explicit LinedUp(int64_t count) : kept_(count + LINE_BYTES / sizeof(T)) {
    const auto start = reinterpret_cast<uintptr_t>(kept_.data());
    at_ = kept_.data() + (-start % LINE_BYTES) / sizeof(T);
  }
  LinedUp(const LinedUp&) = delete;
  T* data() { return at_; }
  const T* data() const { return at_; }

 private:
  std::vector<T> kept_;
  T* at_;
};

// Polynomials through the nodes of -1 to 1; the first half of the nodes lies above 0, each of the
// others as far below.
struct Nodes {
  static double at(int k) { return std::cos(M_PI * (k + 0.5) / NODES); }
  // 1 at node k and 0 at the others.
  static double polynomial(int k, double x) {
    double value = 1;
    for (int m = 0; m < NODES; ++m)
      if (m != k) value *= (x - at(m)) / (at(k) - at(m));
    return value;
  }
  // What a function gives to x that is 1 at node k and 1 (even) or -1 (odd) at its mirror image.
  static double even(int k, double x) { return polynomial(k, x) + polynomial(NODES - 1 - k, x); }
  static double odd(int k, double x) { return polynomial(k, x) - polynomial(NODES - 1 - k, x); }
};

// Turns, each by an angle of its own: cosines, twice each, and `width` behind them sines, with both
// signs each, so that a vector of them turns as many pairs of numbers. Here each of them from
// `first` to `last` is turned by another.
inline void turn_on(
    int64_t first, int64_t last, int64_t width, double* __restrict turned,
    const double* __restrict by) {
  for (int64_t j = first; j < last; ++j) {
    const double c = turned[j], s = turned[width + j];
    turned[j] = c * by[j] - s * by[width + j];
    turned[width + j] = s * by[j] + c * by[width + j];
  }
}

class RotaryTables {
 public:
  explicit RotaryTables(const std::vector<double>& frequencies)
      : frequencies(frequencies),
        slowest(first_slower(NODES_TURN / STRETCH_REACH, NODES)),
        slow(first_slower(NODES_TURN / TILE_REACH, NODES / 2)),
        slow_at(round_up(2 * slow, LANES)),
        slowest_at(slow_at + round_up(2 * (slowest - slow), LANES)),
        width(slowest_at + round_up(2 * (pairs() - slowest), LANES)),
        columns_(inner() * TILE),
        nodes_((pairs() - slow) * NODES),
        stretch_(STRETCH_TILES * NODES * NODES),
        turns_(2 * pairs() * TILE),
        powers_((STRETCH_MIDDLE + 1) * 2 * width) {
    make_powers();
    for (int64_t j = 0; j < pairs(); ++j) make_pair(j);
    if (slow < pairs()) make_columns(columns_.data() + slow * TILE);
    if (slowest < pairs()) make_stretch(stretch_.data());
  }

  // Those of the last embedding are kept, for all layers have the same.
  static std::shared_ptr<const RotaryTables> of(const double* from, int64_t count) {
    static std::mutex mutex;
    static std::shared_ptr<const RotaryTables> last;
    const std::lock_guard<std::mutex> lock(mutex);
    const std::vector<double> wanted(from, from + count);
    const auto same = [&](const std::vector<double>& x) {
      return x.size() == wanted.size() &&
             !std::memcmp(x.data(), wanted.data(), count * sizeof(double));
    };
    if (!last || !same(last->frequencies)) last = std::make_shared<RotaryTables>(wanted);
    return last;
  }

  const std::vector<double> frequencies;
  // The first pairs of a kind; all after them are no faster.
  const int64_t slowest, slow;
  // Where two numbers for each pair of a kind begin, each kind in whole vectors, `width` in all.
  const int64_t slow_at, slowest_at, width;

  int64_t pairs() const { return static_cast<int64_t>(frequencies.size()); }
  int64_t place(int64_t j) const {
    if (j < slow) return 2 * j;
    return j < slowest ? slow_at + 2 * (j - slow) : slowest_at + 2 * (j - slowest);
  }
  // Sums of which a row of scores is made: of even parts, and as many of odd ones.
  int64_t inner() const { return slow + (slow < pairs() ? NODES / 2 : 0); }

  // By sum, what it gives to the positions after the middle: even, then odd [HALF_TILE] each.
  const float* columns() const { return columns_.data(); }
  // By pair from `slow` on, cosine and sine in turns at the nodes above 0 of a tile, for the
  // slowest of a stretch: [NODES].
  const float* nodes() const { return nodes_.data(); }
  // By number at the nodes of a stretch, what it adds to those of a tile: [NODES, NODES].
  const float* stretch(int64_t tile) const { return stretch_.data() + tile * NODES * NODES; }
  // By pair, cosines at all positions of a tile from its middle, then sines: [TILE] each.
  const float* turns() const { return turns_.data(); }

  // What is turned by 2^bit positions, or from a tile's or a stretch's begin to its middle.
  static constexpr int BITS = 40, TILE_MIDDLE = BITS, STRETCH_MIDDLE = BITS + 1;
  const double* power(int bit) const { return powers_.data() + bit * 2 * width; }

 private:
  // Where so few turn no faster that they are added up faster one by one, the number of all.
  int64_t first_slower(double frequency, int few) const {
    int64_t first = pairs();
    while (first > 0 && std::fabs(frequencies[first - 1]) <= frequency) --first;
    return pairs() - first > few ? first : pairs();
  }

  void make_powers() {
    double* first = powers_.data();
    for (int64_t j = 0; j < pairs(); ++j) {
      set_turn(first + place(j), frequencies[j]);
      set_turn(first + TILE_MIDDLE * 2 * width + place(j), frequencies[j] * TILE_REACH);
      set_turn(first + STRETCH_MIDDLE * 2 * width + place(j), frequencies[j] * STRETCH_REACH);
    }
    for (int bit = 1; bit < BITS; ++bit, first += 2 * width) {
      std::copy(first, first + 2 * width, first + 2 * width);
      turn_on(0, width, width, first + 2 * width, first);
    }
  }
  void set_turn(double* to, double angle) const {
    to[0] = to[1] = std::cos(angle);
    to[width] = std::sin(angle), to[width + 1] = -to[width];
  }

  void make_pair(int64_t j) {
    float *cosines = turns_.data() + j * 2 * TILE, *sines = cosines + TILE;
    for (int i = 0; i < TILE; ++i) {
      cosines[i] = static_cast<float>(std::cos(frequencies[j] * (i - TILE_REACH)));
      sines[i] = static_cast<float>(std::sin(frequencies[j] * (i - TILE_REACH)));
    }
    if (j < slow) {
      std::copy(cosines + HALF_TILE, cosines + TILE, columns_.data() + j * TILE);
      std::copy(sines + HALF_TILE, sines + TILE, columns_.data() + j * TILE + HALF_TILE);
      return;
    }
    const double reach = frequencies[j] * (j < slowest ? TILE_REACH : STRETCH_REACH);
    float* at_nodes = nodes_.data() + (j - slow) * NODES;
    for (int k = 0; k < NODES / 2; ++k) {
      at_nodes[2 * k] = static_cast<float>(std::cos(reach * Nodes::at(k)));
      at_nodes[2 * k + 1] = static_cast<float>(std::sin(reach * Nodes::at(k)));
    }
  }

  static void make_columns(float* to) {
    for (int k = 0; k < NODES / 2; ++k, to += TILE) {
      for (int i = 0; i < HALF_TILE; ++i) {
        const double x = (i + 0.5) / TILE_REACH;
        to[i] = static_cast<float>(Nodes::even(k, x));
        to[HALF_TILE + i] = static_cast<float>(Nodes::odd(k, x));
      }
    }
  }

  static void make_stretch(float* to) {
    for (int tile = 0; tile < STRETCH_TILES; ++tile) {
      const double middle = tile * TILE + TILE_REACH - STRETCH_REACH;
      for (int k = 0; k < NODES; ++k) {
        const auto add = k % 2 ? Nodes::odd : Nodes::even;
        for (int m = 0; m < NODES; m += 2) {
          const double away = TILE_REACH * Nodes::at(m / 2);
          const double after = add(k / 2, (middle + away) / STRETCH_REACH);
          const double before = add(k / 2, (middle - away) / STRETCH_REACH);
          *to++ = static_cast<float>((after + before) / 2);
          *to++ = static_cast<float>((after - before) / 2);
        }
      }
    }
  }

  LinedUp<float> columns_, nodes_, stretch_, turns_;
  LinedUp<double> powers_;
};

// Where an item is on its way from tile to tile.
class TilePlace {
 public:
  static int64_t floats(const RotaryTables& tables) { return 2 * tables.width; }

  // `turned`: kept from item to item, for its memory. `by_stretch`: the slowest turn from stretch
  // to stretch, all others from tile to tile.
  TilePlace(
      const RotaryTables& tables, bool by_stretch, float* memory, std::vector<double>& turned)
      : tables_(tables), turned_(turned), now_(memory) {
    turned_.resize(2 * tables.width);
    near_ = by_stretch ? tables.slowest_at : tables.width;
  }

  // Before the first tile, which begins at this position.
  void start(int64_t position) {
    tile_ = -1;
    const int64_t width = tables_.width;
    const double* middle = tables_.power(RotaryTables::TILE_MIDDLE);
    std::copy(middle, middle + 2 * width, turned_.data());
    middle = tables_.power(RotaryTables::STRETCH_MIDDLE);
    for (int64_t at : {int64_t{0}, width})
      std::copy(middle + at + near_, middle + at + width, turned_.data() + at + near_);
    for (int bit = 0; position >> bit; ++bit)
      if (position >> bit & 1) turn_on(0, width, width, turned_.data(), tables_.power(bit));
  }

  void next() {
    tile_ = (tile_ + 1) % STRETCH_TILES;
    take(0, near_, TILE_BIT);
    if (tile_ == 0) take(near_, tables_.width, STRETCH_BIT);
  }

  // The tile's number in its stretch.
  int64_t tile() const { return tile_; }
  // Turns from position 0 to the middle of the tile or the stretch, laid out as in `turn_on`.
  const float* turn() const { return now_; }

 private:
  void take(int64_t first, int64_t last, int bit) {
    const int64_t width = tables_.width;
    for (int64_t at : {int64_t{0}, width})
      for (int64_t j = at + first; j < at + last; ++j) now_[j] = static_cast<float>(turned_[j]);
    turn_on(first, last, width, turned_.data(), tables_.power(bit));
  }

  const RotaryTables& tables_;
  std::vector<double>& turned_;
  float* now_;
  int64_t near_, tile_ = -1;
};

}  // namespace ascend_kv::cpu
