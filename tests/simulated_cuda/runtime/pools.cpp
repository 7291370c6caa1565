// Memory that is taken and given back in the order of streams (cudaMallocAsync): the default pool of each device.
//
// A block is taken again by who has waited for the stream that gave it back; failing that the pool grows, and where the
// device has no more, the one who takes a block waits for it. A driver may also take what happens to be done already:
// left out, so that a program meets the same addresses each time. No block spans two pieces that the pool grew by, which a
// driver can map beside each other: memory runs out here a little earlier.
#include "core.h"

#include <algorithm>
#include <map>
#include <mutex>

namespace simulated {
namespace {

constexpr uint64_t kGranule = 512;
constexpr uint64_t kPiece = uint64_t{32} << 20; // by which a pool grows at least
constexpr uint64_t kStep = uint64_t{2} << 20;

uint64_t rounded(uint64_t bytes, uint64_t to) { return (bytes + to - 1) / to * to; }

struct Block {
  uint64_t bytes;
  uintptr_t piece; // of the pool, in which it lies
  bool taken;
  std::vector<Moment> given_back; // for each part of it that was: when
};

struct Pool {
  std::map<uintptr_t, Block> blocks;
  std::map<uintptr_t, uint64_t> pieces;
  PoolCounters counters;
};

std::recursive_mutex &pools_mutex = *new std::recursive_mutex;
std::map<int, Pool> &pools = *new std::map<int, Pool>;

using Lock = std::lock_guard<std::recursive_mutex>;
using Place = std::map<uintptr_t, Block>::iterator;

bool is_free_for(const Block &block, Stream *stream) {
  return std::all_of(block.given_back.begin(), block.given_back.end(),
                     [stream](const Moment &moment) { return comes_after(stream, moment); });
}

// The smallest block that will do, of two such the first.
Place find(Pool &pool, uint64_t bytes, Stream *stream, bool may_wait) {
  Place best = pool.blocks.end();
  for (Place at = pool.blocks.begin(); at != pool.blocks.end(); ++at) {
    const Block &block = at->second;
    if (block.taken || block.bytes < bytes || (best != pool.blocks.end() && best->second.bytes <= block.bytes)) continue;
    if (may_wait || is_free_for(block, stream)) best = at;
  }
  return best;
}

bool grow(Pool &pool, int device, uint64_t bytes) {
  for (uint64_t piece_bytes : {std::max(kPiece, rounded(bytes, kStep)), rounded(bytes, kStep)}) {
    void *found = allocate(device, piece_bytes);
    if (found == nullptr) continue;
    auto address = reinterpret_cast<uintptr_t>(found);
    pool.pieces[address] = piece_bytes;
    pool.blocks[address] = Block{piece_bytes, address, false, {}};
    pool.counters.reserved += piece_bytes;
    pool.counters.reserved_high = std::max(pool.counters.reserved_high, pool.counters.reserved);
    return true;
  }
  return false;
}

void take(Pool &pool, Place place, uint64_t bytes, Stream *stream) {
  auto &[address, block] = *place;
  for (const Moment &moment : block.given_back)
    if (!comes_after(stream, moment)) make_wait(stream, moment);
  if (block.bytes > bytes) pool.blocks[address + bytes] = Block{block.bytes - bytes, block.piece, false, block.given_back};
  block = Block{bytes, block.piece, true, {}};
  pool.counters.used += bytes;
  pool.counters.used_high = std::max(pool.counters.used_high, pool.counters.used);
}

// With the free block behind it, if there is one.
void join_with_next(Pool &pool, Place place) {
  Place next = std::next(place);
  Block &block = place->second;
  if (next == pool.blocks.end() || next->second.taken || block.taken || next->second.piece != block.piece) return;
  block.bytes += next->second.bytes;
  for (const Moment &moment : next->second.given_back) add_moment(block.given_back, moment);
  pool.blocks.erase(next);
}

} // namespace

void *allocate_in_order(Stream *stream, uint64_t bytes) {
  int device = stream_device(stream);
  bytes = rounded(bytes, kGranule);
  Lock lock(pools_mutex);
  Pool &pool = pools[device];
  Place place = find(pool, bytes, stream, false);
  if (place == pool.blocks.end() && grow(pool, device, bytes)) place = find(pool, bytes, stream, false);
  if (place == pool.blocks.end()) place = find(pool, bytes, stream, true);
  if (place == pool.blocks.end()) {
    trim_pool(device, 0);
    if (grow(pool, device, bytes)) place = find(pool, bytes, stream, false);
  }
  if (place == pool.blocks.end()) return nullptr;
  take(pool, place, bytes, stream);
  return reinterpret_cast<void *>(place->first);
}

bool release_in_order(Stream *stream, void *pointer) {
  Lock lock(pools_mutex);
  Pool &pool = pools[device_of(pointer)];
  Place place = pool.blocks.find(reinterpret_cast<uintptr_t>(pointer));
  if (place == pool.blocks.end() || !place->second.taken) {
    report("memory is given back to a pool that did not come from it, or twice");
    return false;
  }
  poison(pointer, place->second.bytes, stream);
  place->second.taken = false;
  place->second.given_back = {now(stream)};
  pool.counters.used -= place->second.bytes;
  join_with_next(pool, place);
  if (place != pool.blocks.begin()) join_with_next(pool, std::prev(place));
  return true;
}

void trim_pool(int device, uint64_t keep_bytes) {
  Lock lock(pools_mutex);
  Pool &pool = pools[device];
  for (auto at = pool.pieces.begin(); at != pool.pieces.end();) {
    auto [address, bytes] = *at;
    Place place = pool.blocks.find(address);
    if (place->second.taken || place->second.bytes != bytes || pool.counters.reserved < keep_bytes + bytes) {
      ++at;
      continue;
    }
    release(reinterpret_cast<void *>(address));
    pool.blocks.erase(place);
    pool.counters.reserved -= bytes;
    at = pool.pieces.erase(at);
  }
}

PoolCounters pool_counters(int device) {
  Lock lock(pools_mutex);
  return pools[device].counters;
}

void reset_pool_highs(int device, bool of_used) {
  Lock lock(pools_mutex);
  PoolCounters &counters = pools[device].counters;
  if (of_used)
    counters.used_high = counters.used;
  else
    counters.reserved_high = counters.reserved;
}

} // namespace simulated
