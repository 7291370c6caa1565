// Looks for a layout under a ceiling among all that have every block lie on another one or on the bottom, each made once.
//
// Blocks are placed by ascending offset, those of the same offset by rank. That such layouts suffice, that a block is
// passed over only for one that begins below its top, that parts of the time that no waiting block joins are searched
// apart, and what a time needs at least, is from MiniMalloc (Moffitt 2023). A layout that exists is mostly found within
// some thousand nodes under one ranking and within none under another, so rankings take turns under growing limits.

#pragma once

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "instance.h"

namespace {

constexpr int kMostInTree = 2000;      // blocks; of more, a node takes too long
constexpr std::int64_t kTreeShare = 3;   // of looks in a round, against those of ejections, which are slower
constexpr std::int64_t kLooserPart = 4;  // of a limit is what a looser ceiling gets, under which a layout is easier
constexpr int kNodesBetweenLooks = 64;  // at the clock

// By what blocks are ranked at the same offset, the highest first; then by what comes next.
enum class Key { kFullest, kLifetime, kArea, kNeighbours, kSteps, kStepsTimesSize, kEnd };

using Ranking = std::vector<Key>;

const std::vector<Ranking>& rankings() {
  static const std::vector<Ranking> all = {
      {Key::kFullest, Key::kLifetime, Key::kArea}, {Key::kFullest, Key::kNeighbours},
      {Key::kFullest, Key::kStepsTimesSize},       {Key::kLifetime, Key::kArea, Key::kFullest},
      {Key::kSteps, Key::kArea, Key::kFullest},    {Key::kStepsTimesSize, Key::kFullest},
      {Key::kFullest, Key::kEnd}};
  return all;
}

class Tree {
 public:
  enum class Answer { kFound, kNone, kGaveUp };

  explicit Tree(const Instance& instance)
      : in_(instance),
        n_spans_(instance.n_times - 1),
        neighbours_(instance.n),
        alive_(n_spans_),
        lowest_(instance.n),
        is_placed_(instance.n),
        fullest_(instance.n),
        rank_(instance.n),
        offsets_(instance.n),
        found_(instance.n),
        waiting_bytes_(n_spans_),
        floor_(n_spans_),
        joined_(n_spans_),
        seen_(n_spans_) {
    for (int block = 0; block < in_.n; ++block) {
      for (int span = in_.lower[block]; span < in_.upper[block]; ++span) {
        alive_[span].push_back(block);
        waiting_bytes_[span] += in_.size[block];
        if (span + 1 < in_.upper[block]) ++joined_[span];
      }
    }
    Order by_lower(in_.n);
    std::iota(by_lower.begin(), by_lower.end(), 0);
    std::stable_sort(by_lower.begin(), by_lower.end(), [&](int a, int b) { return in_.lower[a] < in_.lower[b]; });
    for (int i = 0; i < in_.n; ++i) {
      for (int k = i + 1; k < in_.n && in_.lower[by_lower[k]] < in_.upper[by_lower[i]]; ++k) {
        neighbours_[by_lower[i]].push_back(by_lower[k]);
        neighbours_[by_lower[k]].push_back(by_lower[i]);
      }
    }
  }

  // Gives up after so many looks at blocks, or once it is late.
  Answer run(const Ranking& ranking, Bytes ceiling, std::int64_t max_looks) {
    ranking_ = &ranking;
    ceiling_ = ceiling;
    left_ = max_looks;
    nodes_ = 0;
    Order all(in_.n);
    std::iota(all.begin(), all.end(), 0);
    for (int block : all) {
      if (in_.size[block] > ceiling) return Answer::kNone;
    }
    if (*std::max_element(waiting_bytes_.begin(), waiting_bytes_.end()) > ceiling) return Answer::kNone;
    rank(all);
    return split(all, 0, n_spans_, 0, -1);
  }

  const std::vector<Bytes>& offsets() const { return found_; }  // of the last run that found a layout
  std::int64_t left() const { return left_; }

 private:
  struct Candidate {
    Bytes offset;
    int rank, block;
    bool operator<(const Candidate& other) const {
      return offset != other.offset ? offset < other.offset : rank < other.rank;
    }
  };
  struct Change {
    bool is_floor;
    int index;
    Bytes before;
  };

  double value(Key key, int block) const {
    const double size = static_cast<double>(in_.size[block]), steps = in_.upper[block] - in_.lower[block];
    switch (key) {
      case Key::kFullest: return static_cast<double>(fullest_[block]);
      case Key::kLifetime: return static_cast<double>(in_.lifetime[block]);
      case Key::kArea: return static_cast<double>(in_.lifetime[block]) * size;
      case Key::kNeighbours: return static_cast<double>(neighbours_[block].size());
      case Key::kSteps: return steps;
      case Key::kStepsTimesSize: return steps * size;
      case Key::kEnd: return in_.upper[block];
    }
    return 0.0;
  }

  // Ranks waiting blocks by how much still has to lie where they live.
  void rank(const Order& blocks) {
    for (int block : blocks) {
      const auto from = waiting_bytes_.begin() + in_.lower[block], to = waiting_bytes_.begin() + in_.upper[block];
      fullest_[block] = *std::max_element(from, to);
    }
    Order ranked = blocks;
    std::sort(ranked.begin(), ranked.end(), [&](int a, int b) {
      for (Key key : *ranking_) {
        const double of_a = value(key, a), of_b = value(key, b);
        if (of_a != of_b) return of_a > of_b;
      }
      return a < b;
    });
    for (int k = 0; k < static_cast<int>(ranked.size()); ++k) rank_[ranked[k]] = k;
  }

  // Places waiting blocks of the spans [from, to), each part that no block joins to another by itself, the smallest
  // first. Those of a part are ranked anew, which at worst makes a layout twice.
  Answer split(const Order& waiting, int from, int to, Bytes last_offset, int last_rank) {
    std::vector<int> ends;
    for (int span = from; span < to; ++span) {
      if (span + 1 == to || joined_[span] == 0) ends.push_back(span + 1);
    }
    if (ends.size() == 1) return visit(waiting, from, to, last_offset, last_rank);
    std::vector<Order> parts(ends.size());
    for (int block : waiting) {
      const auto end = std::upper_bound(ends.begin(), ends.end(), in_.lower[block]);
      parts[end - ends.begin()].push_back(block);
    }
    Order smallest_first(parts.size());
    std::iota(smallest_first.begin(), smallest_first.end(), 0);
    std::stable_sort(smallest_first.begin(), smallest_first.end(),
                     [&](int a, int b) { return parts[a].size() < parts[b].size(); });
    for (int part : smallest_first) {
      const Order& blocks = parts[part];
      if (blocks.empty()) continue;
      Order ranks;
      for (int block : blocks) ranks.push_back(rank_[block]);
      rank(blocks);
      const Answer answer = visit(blocks, part == 0 ? from : ends[part - 1], ends[part], last_offset, -1);
      for (std::size_t k = 0; k < blocks.size(); ++k) rank_[blocks[k]] = ranks[k];
      if (answer != Answer::kFound) return answer;
    }
    return Answer::kFound;
  }

  Answer visit(const Order& waiting, int from, int to, Bytes last_offset, int last_rank) {
    if (waiting.empty()) return Answer::kFound;
    if (left_ <= 0 || (++nodes_ % kNodesBetweenLooks == 0 && in_.is_late())) return Answer::kGaveUp;
    left_ -= static_cast<std::int64_t>(waiting.size());
    Bytes lowest_top = kNoStop;
    for (int block : waiting) lowest_top = std::min(lowest_top, lowest_[block] + in_.size[block]);
    // A block from lowest_top on would leave a gap into which the one with that top could fall.
    std::vector<Candidate> able;
    for (int block : waiting) {
      const Bytes offset = lowest_[block];
      const bool is_next = offset > last_offset || (offset == last_offset && rank_[block] > last_rank);
      if (is_next && offset < lowest_top) able.push_back({offset, rank_[block], block});
    }
    std::sort(able.begin(), able.end());
    Order rest;
    for (const Candidate& next : able) {
      const std::size_t before = trail_.size();
      bool has_neighbours = false;
      Answer answer = Answer::kNone;
      if (place(next.block, next.offset, from, to, has_neighbours)) {
        found_[next.block] = next.offset;
        rest.clear();
        for (int block : waiting) {
          if (block != next.block) rest.push_back(block);
        }
        answer = split(rest, from, to, next.offset, next.rank);
      }
      take_back(next.block, before);
      if (answer != Answer::kNone) return answer;
      if (!has_neighbours) break;  // it was in nobody's way, so it is not what failed
    }
    return Answer::kNone;
  }

  // Returns whether what waits may still lie under the ceiling.
  bool place(int block, Bytes offset, int from, int to, bool& has_neighbours) {
    const int lower = in_.lower[block], upper = in_.upper[block];
    const Bytes top = offset + in_.size[block];
    is_placed_[block] = true;
    offsets_[block] = offset;
    for (int span = lower; span < upper; ++span) {
      waiting_bytes_[span] -= in_.size[block];
      if (span + 1 < upper) --joined_[span];
    }
    left_ -= static_cast<std::int64_t>(neighbours_[block].size());
    bool fits = true;
    for (int other : neighbours_[block]) {
      if (is_placed_[other]) continue;
      has_neighbours = true;
      fits = fits && std::max(lowest_[other], in_.aligned(top, other)) + in_.size[other] <= ceiling_;
    }
    // Whatever comes lies at this offset or higher.
    for (int span = from; span < to && fits; ++span) {
      fits = waiting_bytes_[span] == 0 || std::max(offset, floor_[span]) + waiting_bytes_[span] <= ceiling_;
    }
    return fits && raise(block, top);
  }

  // Raises what waits above a block, and the floors of the times at which that lives.
  bool raise(int block, Bytes top) {
    ++round_;
    risen_.clear();
    const auto look_at = [&](int span) {
      if (seen_[span] == round_) return;
      seen_[span] = round_;
      risen_.push_back(span);
    };
    for (int other : neighbours_[block]) {
      if (is_placed_[other] || lowest_[other] >= top) continue;
      const Bytes before = lowest_[other];
      trail_.push_back({false, other, before});
      lowest_[other] = in_.aligned(top, other);
      for (int span = in_.lower[other]; span < in_.upper[other]; ++span) {
        if (floor_[span] >= before) look_at(span);
      }
    }
    for (int span = in_.lower[block]; span < in_.upper[block]; ++span) look_at(span);
    for (int span : risen_) {
      if (waiting_bytes_[span] == 0) continue;
      Bytes lowest = kNoStop;
      for (int other : alive_[span]) {
        if (!is_placed_[other]) lowest = std::min(lowest, lowest_[other]);
      }
      left_ -= static_cast<std::int64_t>(alive_[span].size()) / 4;
      if (lowest <= floor_[span]) continue;
      if (lowest + waiting_bytes_[span] > ceiling_) return false;
      trail_.push_back({true, span, floor_[span]});
      floor_[span] = lowest;
    }
    return true;
  }

  void take_back(int block, std::size_t trail_size) {
    while (trail_.size() > trail_size) {
      const Change& change = trail_.back();
      (change.is_floor ? floor_ : lowest_)[change.index] = change.before;
      trail_.pop_back();
    }
    is_placed_[block] = false;
    for (int span = in_.lower[block]; span < in_.upper[block]; ++span) {
      waiting_bytes_[span] += in_.size[block];
      if (span + 1 < in_.upper[block]) ++joined_[span];
    }
  }

  const Instance& in_;
  int n_spans_;                           // between two times that follow one another
  std::vector<Order> neighbours_;        // blocks that live at the same time as a block
  std::vector<Order> alive_;             // blocks of a span
  std::vector<Bytes> lowest_;            // where a waiting block may lie at the lowest
  std::vector<char> is_placed_;
  std::vector<Bytes> fullest_;           // the most bytes that wait at a time of a block, when it was ranked
  std::vector<int> rank_;
  std::vector<Bytes> offsets_, found_;
  std::vector<Bytes> waiting_bytes_;     // of a span: of blocks without a place
  std::vector<Bytes> floor_;             // of a span: nothing that waits there can lie lower
  std::vector<int> joined_;              // how many waiting blocks live in a span and in the next one
  std::vector<std::int64_t> seen_;
  std::int64_t round_ = 0;
  std::vector<int> risen_;
  std::vector<Change> trail_;
  const Ranking* ranking_ = nullptr;
  Bytes ceiling_ = 0;
  std::int64_t left_ = 0, nodes_ = 0;
};

// Runs of the tree in turns with the other searches: under each ranking, under a ceiling at the bound, one halfway to
// the best arena and one just below it, then all of that again with twice the limit.
class TreeSearch {
 public:
  TreeSearch(const Instance& instance, Bytes granule, Best& best)
      : in_(instance),
        granule_(granule),
        best_(best),
        per_round_(kTreeShare * std::min(kLooks * instance.n, kMostLooks)),
        limit_(per_round_) {}

  void round() {
    if (in_.n > kMostInTree) return;
    if (trees_.empty()) trees_.emplace_back(in_);
    for (credit_ += per_round_; credit_ >= limit_ && !best_.is_enough() && !in_.is_late(); next()) {
      const Bytes highest = best_.arena - granule_;
      const Bytes halfway = best_.enough + (highest - best_.enough) / 2 / granule_ * granule_;
      const Bytes ceiling = ceiling_ == 0 ? best_.enough : ceiling_ == 1 ? halfway : highest;
      const bool is_twice = (ceiling_ > 0 && ceiling == best_.enough) || (ceiling_ == 2 && ceiling == halfway);
      if (!is_twice) try_under(ceiling);
    }
  }

 private:
  void try_under(Bytes ceiling) {
    Tree& tree = trees_.front();
    const std::int64_t most = ceiling_ == 0 ? limit_ : limit_ / kLooserPart;
    const Tree::Answer answer = tree.run(rankings()[ranking_], ceiling, most);
    credit_ -= most - tree.left();
    if (answer == Tree::Answer::kNone) {
      best_.refuted = std::max(best_.refuted, ceiling);
      best_.enough = std::max(best_.enough, ceiling + granule_);
    }
    if (answer != Tree::Answer::kFound) return;
    best_.offsets = tree.offsets();
    best_.arena = 0;
    for (int block = 0; block < in_.n; ++block) {
      best_.arena = std::max(best_.arena, best_.offsets[block] + in_.size[block]);
    }
  }

  void next() {
    ranking_ = (ranking_ + 1) % rankings().size();
    if (ranking_ > 0) return;
    ceiling_ = (ceiling_ + 1) % 3;
    if (ceiling_ == 0) limit_ *= 2;
  }

  const Instance& in_;
  Bytes granule_;
  Best& best_;
  std::int64_t per_round_, limit_, credit_ = 0;
  std::size_t ranking_ = 0;
  int ceiling_ = 0;
  std::vector<Tree> trees_;  // one, once it is needed
};

}  // namespace
