// Packs blocks into one arena: a skyline decoder, a search over its orders, ejections under a falling ceiling, and a
// tree of layouts.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <queue>
#include <utility>
#include <vector>

#include "instance.h"
#include "tree.h"

namespace {

constexpr Bytes kWhenLate = kNoStop - 1;  // a stop that only the clock meets
constexpr int kPlacedBetweenLooks = 256;  // at the clock, while a skyline is decoded
constexpr int kDecodes = 30;                // of one round of the search over orders, fewer if blocks are many
constexpr int kPlacements = 15000;          // in one round of the search over orders, about
constexpr int kManyBlocks = 3000;           // of so many, each round draws one more weighing: moves gain little then
constexpr int kStaleRounds = 60;            // without a better order, after which the search starts again
constexpr int kShifts = 2;                  // of neighbours, after a block took its place
constexpr int kSteps = 20;                  // the ceiling falls by this part of the way to the bound
constexpr std::int64_t kMaxKept = 40000000;  // pairs of blocks that live together, of which lists are kept

// How a skyline weighs times: those at which the least room is left count most.
struct Weighing {
  std::int64_t width;  // in thousandths of the bytes without a place: what is so far below the fullest time counts least
  std::int64_t floor;  // weight of the times that count least; that of the fullest is 1024 more
  std::int64_t parts;  // how often the times are weighed

  static Weighing drawn(Random& random) {
    const std::int64_t width = 40 + random.below(81), floor = 5 + random.below(36);
    return {width, floor, 100 + random.below(301)};
  }
};

// Best fit on a skyline: the lowest segment takes the unplaced block of the highest key that lives within it.
class Skyline {
 public:
  explicit Skyline(const Instance& instance)
      : in_(instance), starts_(instance.n_times + 1), sorted_(instance.n), slot_(instance.n), key_(instance.n) {
    for (int block = 0; block < in_.n; ++block) ++starts_[in_.lower[block] + 1];
    std::partial_sum(starts_.begin(), starts_.end(), starts_.begin());
    std::vector<int> next(starts_.begin(), starts_.end() - 1);
    for (int block = 0; block < in_.n; ++block) {
      slot_[block] = next[in_.lower[block]]++;
      sorted_[slot_[block]] = block;
    }
    while (leaves_ < in_.n) leaves_ *= 2;
    nodes_.resize(2 * leaves_);
  }

  // Keys by the order, the first block having the highest.
  // Returns the height of the arena, or the first height of at least `stop` that it met; `stop` itself once it is late,
  // unless that is kNoStop.
  Bytes decode(const Order& order, Bytes stop, std::vector<Bytes>& offsets) {
    begin();
    for (int k = 0; k < in_.n; ++k) key_[order[k]] = in_.n - k;
    plant();
    return run(stop, offsets, [](int) {});
  }

  // Keys by the weight of the times at which a block lives. The order in which the blocks were placed gives the same
  // layout in `decode`.
  Bytes decode(const Weighing& weighing, Bytes stop, std::vector<Bytes>& offsets, Order& order) {
    begin();
    order.clear();
    const int part = std::max<int>(1, in_.n / static_cast<int>(weighing.parts));
    weigh(weighing);
    return run(stop, offsets, [&](int block) {
      order.push_back(block);
      if (order.size() % part == 0 && static_cast<int>(order.size()) < in_.n) weigh(weighing);
    });
  }

 private:
  struct Segment {
    int from, to;
    Bytes height;
    int before, after;
    bool is_there;
  };
  using Entry = std::pair<std::pair<Bytes, int>, int>;

  struct Node {  // of the blocks without a place
    Bytes key;  // the highest
    int upper;  // the first end
  };

  static constexpr Node kNone{-1, std::numeric_limits<int>::max()};

  void begin() {
    is_placed_.assign(in_.n, false);
    segments_.assign(1, Segment{0, in_.n_times - 1, 0, -1, -1, true});
    queue_ = {};
    queue_.push({{0, 0}, 0});
  }

  template <typename Placed>
  Bytes run(Bytes stop, std::vector<Bytes>& offsets, Placed placed) {
    Bytes height = 0;
    for (int left = in_.n; left > 0;) {
      const auto [key, index] = queue_.top();
      queue_.pop();
      const Segment& lowest = segments_[index];
      if (!lowest.is_there || lowest.height != key.first || lowest.from != key.second) continue;
      const int block = first_within(lowest);
      if (block < 0) {
        lift(index);
        continue;
      }
      offsets[block] = in_.aligned(lowest.height, block);
      const Bytes top = offsets[block] + in_.size[block];
      height = std::max(height, top);
      if (height >= stop) return height;
      take_out(block);
      put(index, block, top);
      --left;
      if (left > 0 && left % kPlacedBetweenLooks == 0 && stop != kNoStop && in_.is_late()) return stop;
      placed(block);
    }
    return height;
  }

  void weigh(const Weighing& weighing) {
    waiting_bytes_.assign(in_.n_times + 1, 0);
    heights_.assign(in_.n_times, 0);
    for (int block = 0; block < in_.n; ++block) {
      if (is_placed_[block]) continue;
      waiting_bytes_[in_.lower[block]] += in_.size[block];
      waiting_bytes_[in_.upper[block]] -= in_.size[block];
    }
    std::partial_sum(waiting_bytes_.begin(), waiting_bytes_.end(), waiting_bytes_.begin());
    for (const Segment& each : segments_) {
      if (each.is_there) std::fill(heights_.begin() + each.from, heights_.begin() + each.to, each.height);
    }
    Bytes fullest = in_.bound, most_waiting = 0;
    for (int t = 0; t < in_.n_times; ++t) {
      if (waiting_bytes_[t] == 0) continue;
      fullest = std::max(fullest, heights_[t] + waiting_bytes_[t]);
      most_waiting = std::max(most_waiting, waiting_bytes_[t]);
    }
    const double share = static_cast<double>(most_waiting) * static_cast<double>(weighing.width) / 1000.0;
    const Bytes width = std::max<Bytes>(1, static_cast<Bytes>(share));
    sums_.assign(in_.n_times + 1, 0);
    for (int t = 0; t < in_.n_times; ++t) {
      const Bytes within = heights_[t] + waiting_bytes_[t] - (fullest - width);
      const double weight = 1024.0 * static_cast<double>(within) / static_cast<double>(width);
      const bool counts = waiting_bytes_[t] > 0 && within > 0;
      sums_[t + 1] = sums_[t] + weighing.floor + (counts ? static_cast<std::int64_t>(weight) : 0);
    }
    for (int block = 0; block < in_.n; ++block) key_[block] = sums_[in_.upper[block]] - sums_[in_.lower[block]];
    plant();
  }

  void plant() {
    for (int slot = 0; slot < leaves_; ++slot) nodes_[leaves_ + slot] = slot < in_.n ? leaf(sorted_[slot]) : kNone;
    for (int node = leaves_ - 1; node > 0; --node) nodes_[node] = joined(node);
  }

  Node leaf(int block) const { return is_placed_[block] ? kNone : Node{key_[block], in_.upper[block]}; }

  Node joined(int node) const {
    const Node &left = nodes_[2 * node], &right = nodes_[2 * node + 1];
    return {std::max(left.key, right.key), std::min(left.upper, right.upper)};
  }

  void take_out(int block) {
    is_placed_[block] = true;
    int node = leaves_ + slot_[block];
    nodes_[node] = kNone;
    for (node /= 2; node > 0; node /= 2) nodes_[node] = joined(node);
  }

  // The highest key, and of several the first slot; -1 if none lives within the segment.
  int first_within(const Segment& segment) const {
    Found found{segment.to, starts_[segment.from], starts_[segment.to], -1, -1};
    look(1, 0, leaves_, found);
    return found.slot < 0 ? -1 : sorted_[found.slot];
  }

  struct Found {
    int latest, from_slot, end_slot;
    int slot;
    Bytes key;
  };

  void look(int node, int from_slot, int n_slots, Found& found) const {
    if (nodes_[node].upper > found.latest || nodes_[node].key <= found.key) return;
    if (from_slot >= found.end_slot || from_slot + n_slots <= found.from_slot) return;
    if (n_slots == 1) {
      found.slot = from_slot;
      found.key = nodes_[node].key;
      return;
    }
    look(2 * node, from_slot, n_slots / 2, found);
    look(2 * node + 1, from_slot + n_slots / 2, n_slots / 2, found);
  }

  void lift(int index) {
    Segment& segment = segments_[index];
    Bytes height = kNoStop;
    if (segment.before >= 0) height = std::min(height, segments_[segment.before].height);
    if (segment.after >= 0) height = std::min(height, segments_[segment.after].height);
    segment.height = height;
    if (segment.before >= 0 && segments_[segment.before].height == height) {
      Segment& gone = segments_[segment.before];
      gone.is_there = false;
      segment.from = gone.from;
      segment.before = gone.before;
      if (gone.before >= 0) segments_[gone.before].after = index;
    }
    if (segment.after >= 0 && segments_[segment.after].height == height) {
      Segment& gone = segments_[segment.after];
      gone.is_there = false;
      segment.to = gone.to;
      segment.after = gone.after;
      if (gone.after >= 0) segments_[gone.after].before = index;
    }
    queue_.push({{height, segment.from}, index});
  }

  // Splits the segment into the part before the block, the block's top, and the part after it.
  void put(int index, int block, Bytes top) {
    const Segment old = segments_[index];
    segments_[index].is_there = false;
    int last = old.before;
    const auto add = [&](int from, int to, Bytes height) {
      const int added = static_cast<int>(segments_.size());
      segments_.push_back({from, to, height, last, -1, true});
      if (last >= 0) segments_[last].after = added;
      queue_.push({{height, from}, added});
      last = added;
    };
    if (old.from < in_.lower[block]) add(old.from, in_.lower[block], old.height);
    if (old.from == in_.lower[block] && old.before >= 0 && segments_[old.before].height == top) {
      segments_[old.before].to = in_.upper[block];
    } else {
      add(in_.lower[block], in_.upper[block], top);
    }
    int after = old.after;
    if (in_.upper[block] < old.to) {
      add(in_.upper[block], old.to, old.height);
    } else if (after >= 0 && segments_[after].height == top) {
      segments_[last].to = segments_[after].to;
      segments_[after].is_there = false;
      after = segments_[after].after;
    }
    segments_[last].after = after;
    if (after >= 0) segments_[after].before = last;
  }

  const Instance& in_;
  std::vector<int> starts_;  // starts_[t]: how many blocks begin before time t
  std::vector<int> sorted_;  // blocks by the beginning of their lifetimes
  std::vector<int> slot_;    // where in sorted_ a block is
  std::vector<Bytes> key_;
  int leaves_ = 1;
  std::vector<Node> nodes_;  // a tree over the slots, its root at 1
  std::vector<char> is_placed_;
  std::vector<Bytes> waiting_bytes_, heights_;  // by time: of blocks without a place, and of those with one
  std::vector<std::int64_t> sums_;              // weights of the times before each
  std::vector<Segment> segments_;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> queue_;
};

// Local search over the decoder's orders: blocks are moved within the order, rather those that end above the bound.
// Each round begins with skylines that weigh times, and goes on from one that is better.
class OrderSearch {
 public:
  OrderSearch(const Instance& instance, std::vector<Order> orders, Best& best)
      : in_(instance), skyline_(instance), orders_(std::move(orders)), best_(best), offsets_(instance.n) {
    int best_start = 0;
    for (int k = 0; k < static_cast<int>(orders_.size()); ++k) {
      if (k > 0 && (best_.is_enough() || in_.is_late())) break;
      const Bytes height = skyline_.decode(orders_[k], best_.arena, offsets_);
      if (height < best_.arena) {
        best_.arena = height;
        best_.offsets = offsets_;
        best_start = k;
      }
    }
    order_ = orders_[best_start];
    height_ = best_.arena;
    current_ = best_.offsets;
  }

  void round(Random& random) {
    const Bytes before = height_;
    for (int k = in_.n / kManyBlocks; k >= 0 && !best_.is_enough() && !in_.is_late(); --k) {
      const Bytes height = skyline_.decode(Weighing::drawn(random), height_, offsets_, tried_);
      if (height >= height_) continue;
      take(height);
      order_.swap(tried_);
    }
    const int decodes = std::min(kPlacements / in_.n, kDecodes);
    for (int k = 0; k < decodes && !best_.is_enough() && !in_.is_late(); ++k) {
      tried_ = order_;
      for (std::int64_t moves = 1 + random.below(3); moves > 0; --moves) move_one(random);
      const Bytes height = skyline_.decode(tried_, height_ + 1, offsets_);
      if (height > height_) continue;
      take(height);
      order_.swap(tried_);
    }
    stale_rounds_ = height_ < before ? 0 : stale_rounds_ + 1;
    if (stale_rounds_ < kStaleRounds) return;
    stale_rounds_ = 0;
    order_ = orders_[random.below(static_cast<std::int64_t>(orders_.size()))];
    const Bytes height = skyline_.decode(order_, kWhenLate, offsets_);
    if (height < kWhenLate) take(height);
  }

 private:
  void take(Bytes height) {
    height_ = height;
    current_.swap(offsets_);
    if (height >= best_.arena) return;
    best_.arena = height;
    best_.offsets = current_;
  }

  void move_one(Random& random) {
    std::int64_t from = random.below(in_.n);
    if (random.below(2) == 1) {
      const auto is_low = [&](int block) { return current_[block] + in_.size[block] <= in_.bound; };
      for (int k = 0; k < 200 && is_low(tried_[from]); ++k) from = random.below(in_.n);
    }
    const std::int64_t to = random.below(random.below(2) == 1 ? from + 1 : in_.n);
    const auto begin = tried_.begin();
    if (to < from) std::rotate(begin + to, begin + from, begin + from + 1);
    if (to > from) std::rotate(begin + from, begin + from + 1, begin + to + 1);
  }

  const Instance& in_;
  Skyline skyline_;
  std::vector<Order> orders_;
  Best& best_;
  Order order_, tried_;
  Bytes height_ = 0;
  std::vector<Bytes> current_, offsets_;
  int stale_rounds_ = 0;
};

// Ejections: under a ceiling below the best arena, a block that has no place takes the one where it ejects the blocks
// of the least weight, and gains weight itself; some of its neighbours shift. Once all have a place, the ceiling falls.
class Ejections {
 public:
  Ejections(const Instance& instance, Bytes granule, Best& best)
      : in_(instance),
        granule_(granule),
        best_(best),
        by_lower_(instance.n),
        kept_(instance.n),
        is_placed_(instance.n),
        weight_(instance.n) {
    std::iota(by_lower_.begin(), by_lower_.end(), 0);
    std::stable_sort(by_lower_.begin(), by_lower_.end(), [&](int a, int b) { return in_.lower[a] < in_.lower[b]; });
  }

  void round(Random& random) {
    const std::int64_t most = std::min(kLooks * in_.n, kMostLooks);
    std::int64_t looks = 0;
    for (int k = 0; looks < most && !best_.is_enough(); ++k) {
      if (k % 16 == 0 && in_.is_late()) return;
      if (known_arena_ != best_.arena) lower_ceiling();
      looks += 1 + place_one(random);
      if (homeless_.empty()) settle();
    }
  }

 private:
  struct Event {
    Bytes key;  // twice the position, and 1 more where a conflict begins: it is open at both ends
    std::int64_t weight;
  };

  void lower_ceiling() {
    known_arena_ = best_.arena;
    offsets_ = best_.offsets;
    const Bytes step = std::max(granule_, (known_arena_ - in_.bound) / kSteps / granule_ * granule_);
    ceiling_ = std::max(in_.bound, known_arena_ - step);
    homeless_.clear();
    for (int block = 0; block < in_.n; ++block) {
      weight_[block] = 1;
      is_placed_[block] = offsets_[block] + in_.size[block] <= ceiling_;
      if (!is_placed_[block]) homeless_.push_back(block);
    }
  }

  // Lets every block fall as low as those under it permit, and keeps that as the best layout.
  void settle() {
    Order by_offset(in_.n);
    std::iota(by_offset.begin(), by_offset.end(), 0);
    std::stable_sort(by_offset.begin(), by_offset.end(), [&](int a, int b) { return offsets_[a] < offsets_[b]; });
    std::vector<Bytes> heights(in_.n_times, 0);
    best_.arena = 0;
    for (int block : by_offset) {
      const auto from = heights.begin() + in_.lower[block], to = heights.begin() + in_.upper[block];
      offsets_[block] = in_.aligned(*std::max_element(from, to), block);
      const Bytes top = offsets_[block] + in_.size[block];
      std::fill(from, to, top);
      best_.arena = std::max(best_.arena, top);
    }
    best_.offsets = offsets_;
  }

  const Order& neighbours(int block) {
    if (!kept_[block].empty()) return kept_[block];
    beside_.clear();
    for (int other : by_lower_) {
      if (in_.lower[other] >= in_.upper[block]) break;
      if (in_.upper[other] > in_.lower[block] && other != block) beside_.push_back(other);
    }
    if (n_kept_ + static_cast<std::int64_t>(beside_.size()) > kMaxKept) return beside_;
    n_kept_ += static_cast<std::int64_t>(beside_.size());
    return kept_[block] = beside_;
  }

  std::int64_t place_one(Random& random) {
    const std::int64_t n_homeless = static_cast<std::int64_t>(homeless_.size());
    const std::int64_t chosen = random.below(2) == 1 ? n_homeless - 1 : random.below(n_homeless);
    const int block = homeless_[chosen];
    homeless_[chosen] = homeless_.back();
    homeless_.pop_back();
    const Order& others = neighbours(block);
    const auto [position, weight] = lightest_position(block, others, random);
    offsets_[block] = position * in_.alignment[block];
    const Bytes from = offsets_[block], to = from + in_.size[block];
    for (int other : others) {
      if (is_placed_[other] && from < offsets_[other] + in_.size[other] && offsets_[other] < to) {
        is_placed_[other] = false;
        homeless_.push_back(other);
      }
    }
    weight_[block] += weight > 0;
    is_placed_[block] = true;
    std::int64_t looks = static_cast<std::int64_t>(others.size());
    if (others.empty()) return looks;
    const Order shifted = drawn(others, random);  // a copy: `others` may be in beside_
    for (int other : shifted) looks += shift(other, random);
    return looks;
  }

  static Order drawn(const Order& others, Random& random) {
    Order found(kShifts);
    for (int& each : found) each = others[random.below(static_cast<std::int64_t>(others.size()))];
    return found;
  }

  // Moves a block to another place where it is free to lie, so that the gaps about it change.
  std::int64_t shift(int block, Random& random) {
    if (!is_placed_[block]) return 0;
    const Order& others = neighbours(block);
    offsets_[block] = lightest_position(block, others, random).first * in_.alignment[block];
    return static_cast<std::int64_t>(others.size());
  }

  // A position, in units of the block's alignment, where it ejects the least weight; one of several by chance.
  std::pair<Bytes, std::int64_t> lightest_position(int block, const Order& others, Random& random) {
    const Bytes unit = in_.alignment[block], highest = (ceiling_ - in_.size[block]) / unit;
    std::int64_t weight = 0;
    events_.clear();
    for (int other : others) {
      if (!is_placed_[other]) continue;
      const Bytes open = offsets_[other] - in_.size[block];
      const Bytes begin = open < 0 ? -1 : open / unit;
      const Bytes end = (offsets_[other] + in_.size[other] + unit - 1) / unit;
      if (begin >= highest) continue;
      if (begin < 0) {
        weight += weight_[other];
      } else {
        events_.push_back({2 * begin + 1, weight_[other]});
      }
      if (end <= highest) events_.push_back({2 * end, -weight_[other]});
    }
    std::sort(events_.begin(), events_.end(), [](const Event& a, const Event& b) { return a.key < b.key; });
    Bytes lightest = 0;
    std::int64_t least = weight, ties = 1;
    const auto consider = [&](Bytes position) {
      if (weight < least) {
        least = weight, lightest = position, ties = 1;
      } else if (weight == least && random.below(++ties) == 0) {
        lightest = position;
      }
    };
    for (std::size_t k = 0; k < events_.size();) {
      const Bytes key = events_[k].key;
      if (key % 2 == 1) consider(key / 2);  // still free here: the conflict begins behind it
      for (; k < events_.size() && events_[k].key == key; ++k) weight += events_[k].weight;
      if (key % 2 == 0) consider(key / 2);
    }
    consider(highest);
    return {lightest, least};
  }

  const Instance& in_;
  Bytes granule_;
  Best& best_;
  Order by_lower_;
  std::vector<Order> kept_;  // blocks that live at the same time as a block, once they were asked for
  std::int64_t n_kept_ = 0;
  Order beside_;  // those of the last block for which there was no room in kept_
  std::vector<char> is_placed_;
  std::vector<std::int64_t> weight_;
  std::vector<Bytes> offsets_;
  Order homeless_;
  std::vector<Event> events_;
  Bytes known_arena_ = kNoStop;
  Bytes ceiling_ = 0;
};

Order order_at(const std::int32_t* orders, int index, int n) {
  return Order(orders + static_cast<std::ptrdiff_t>(index) * n, orders + static_cast<std::ptrdiff_t>(index + 1) * n);
}

}  // namespace

extern "C" {

// Writes the offsets of one order, and returns the arena's bytes.
std::int64_t pooch_packing_decode(
    std::int32_t n, std::int32_t n_times, const std::int32_t* lower, const std::int32_t* upper,
    const std::int64_t* lifetime, const std::int64_t* size, const std::int64_t* alignment, const std::int32_t* order,
    std::int64_t* offsets) {
  const Instance instance{n, n_times, lower, upper, lifetime, size, alignment, 0, 0.0};
  std::vector<Bytes> found(n);
  const Bytes arena = Skyline(instance).decode(order_at(order, 0, n), kNoStop, found);
  std::copy(found.begin(), found.end(), offsets);
  return arena;
}

// Writes the offsets of the best layout that is found until the bound, the rounds or the CPU seconds are used up, and
// of how many bytes it was proven that no arena is as small. Where `has_start` is not 0, `offsets` holds a layout to
// begin with, if no order gives a better one. Returns the rounds that were begun.
std::int64_t pooch_packing_search(
    std::int32_t n, std::int32_t n_times, const std::int32_t* lower, const std::int32_t* upper,
    const std::int64_t* lifetime, const std::int64_t* size, const std::int64_t* alignment, std::int32_t n_orders,
    const std::int32_t* orders, std::int64_t bound, std::int64_t granule, std::uint64_t seed, std::int64_t max_rounds,
    double limit_s, std::int32_t has_start, std::int64_t* offsets, std::int64_t* refuted) {
  const Instance instance{n, n_times, lower, upper, lifetime, size, alignment, bound, cpu_seconds() + limit_s};
  std::vector<Order> starts;
  for (int k = 0; k < n_orders; ++k) starts.push_back(order_at(orders, k, n));
  Best best;
  best.enough = bound;
  Random random(seed);
  OrderSearch order_search(instance, std::move(starts), best);
  if (has_start != 0) {
    Bytes arena = 0;
    for (int block = 0; block < n; ++block) arena = std::max(arena, offsets[block] + size[block]);
    if (arena < best.arena) {
      best.arena = arena;
      best.offsets.assign(offsets, offsets + n);
    }
  }
  std::int64_t rounds = 0;
  const auto is_over = [&] { return rounds >= max_rounds || best.is_enough() || instance.is_late(); };
  if (!is_over()) {
    Ejections ejections(instance, granule, best);
    TreeSearch tree_search(instance, granule, best);
    for (; !is_over(); ++rounds) {
      tree_search.round();
      order_search.round(random);
      ejections.round(random);
    }
  }
  std::copy(best.offsets.begin(), best.offsets.end(), offsets);
  *refuted = best.refuted;
  return rounds;
}

// Looks for a layout whose arena is at most `ceiling`, and writes its offsets. Returns 1 if it found one, 0 if there is
// none, and -1 if it gave up after `max_looks` at blocks. `ranking` decides what is tried first.
std::int32_t pooch_packing_exhaust(
    std::int32_t n, std::int32_t n_times, const std::int32_t* lower, const std::int32_t* upper,
    const std::int64_t* lifetime, const std::int64_t* size, const std::int64_t* alignment, std::int64_t ceiling,
    std::int64_t max_looks, std::int32_t ranking, std::int64_t* offsets) {
  const Instance instance{n, n_times, lower, upper, lifetime, size, alignment, 0, kNoDeadline};
  Tree tree(instance);
  const Tree::Answer answer = tree.run(rankings()[ranking], ceiling, max_looks);
  if (answer != Tree::Answer::kFound) return answer == Tree::Answer::kNone ? 0 : -1;
  std::copy(tree.offsets().begin(), tree.offsets().end(), offsets);
  return 1;
}

}  // extern "C"
