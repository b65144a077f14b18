// Catalog, history, arenas and the storage index.
#include "server/catalog.h"

#include "tests/support/catch.h"
#include "tests/support/fake_clock.h"

namespace modelcache {
namespace {

using std::chrono::seconds;

template <typename Id>
Id Numbered(std::uint8_t number) {
  Id id;
  id.bytes[0] = number;
  return id;
}

struct CatalogFixture {
  FakeClock clock;
  LruPlanner planner;
  Catalog catalog{1000, planner};

  static FileIdentity File(std::uint64_t size_bytes, std::uint64_t inode = 5) {
    return {"m.safetensors", "/m.safetensors", FileStat{1, inode, size_bytes, 10, 20}};
  }

  static Wanted Want(std::uint8_t id, std::uint64_t size_bytes) {
    return {Numbered<ModelId>(id), "/m.safetensors", {File(size_bytes)}, {}, "m"};
  }

  void AddArena(std::uint8_t number, std::uint64_t bytes) {
    ArenaEntry entry;
    entry.id = Numbered<ArenaId>(number);
    entry.size_bytes = bytes;
    entry.cost_bytes = bytes;
    entry.sealed = true;
    catalog.arenas().Add(entry);
  }

  // A model with its own arena of the same number.
  ModelId Add(std::uint8_t number, std::uint64_t bytes, const std::string& path) {
    AddArena(number, bytes);
    ResidentModel model;
    model.id = Numbered<ModelId>(number);
    model.name = path;
    model.path = path;
    model.identities = {File(bytes)};
    model.arenas = {{Numbered<ArenaId>(number), 3, 4, bytes}};
    model.places = {{Numbered<ArenaId>(number), 0, bytes, Digest{}}};
    const ModelId id = model.id;
    catalog.Insert(std::move(model), clock.Now());
    catalog.arenas().Unuse(Numbered<ArenaId>(number));  // as the job that made it does
    clock.Advance(seconds(1));
    return id;
  }
};

TEST_CASE("Catalog: a model is found by id, prefix, name and path", "[unit]") {
  CatalogFixture f;
  const ModelId id = f.Add(0xAB, 10, "/a");
  f.Add(0xCD, 10, "/b");
  CHECK(f.catalog.Resolve(id.Hex()).value() == id);
  CHECK(f.catalog.Resolve("ab0000").value() == id);
  CHECK(f.catalog.Resolve("/a").value() == id);
  CHECK(f.catalog.Resolve("ab000").error().code == ErrorCode::kNotFound);  // five digits
  CHECK(f.catalog.Resolve("/nowhere").error().code == ErrorCode::kNotFound);
}

TEST_CASE("Catalog: an ambiguous name is refused with the ids", "[unit]") {
  CatalogFixture f;
  const ModelId one = f.Add(1, 10, "/same");
  const ModelId two = f.Add(2, 10, "/same");
  const auto resolved = f.catalog.Resolve("/same");
  REQUIRE_FALSE(resolved.ok());
  CHECK(resolved.error().code == ErrorCode::kInvalidArgument);
  CHECK_THAT(resolved.error().message, Contains(one.Hex()) && Contains(two.Hex()));
}

TEST_CASE("Catalog: a lease belongs to its session", "[unit]") {
  CatalogFixture f;
  const ModelId id = f.Add(1, 10, "/a");
  const LeaseId lease = f.catalog.Lease(id, SessionId{1}, f.clock.Now());
  CHECK(f.catalog.Leased(SessionId{2}, lease) == nullptr);
  CHECK_FALSE(f.catalog.Release(SessionId{2}, lease, f.clock.Now()));
  CHECK(f.catalog.Find(id)->leases == 1);
  CHECK(f.catalog.Release(SessionId{1}, lease, f.clock.Now()));
  CHECK_FALSE(f.catalog.Release(SessionId{1}, lease, f.clock.Now()));
  CHECK(f.catalog.lease_count() == 0);
}

TEST_CASE("Catalog: the end of a session ends all its leases and no other", "[unit]") {
  CatalogFixture f;
  const ModelId id = f.Add(1, 10, "/a");
  f.catalog.Lease(id, SessionId{1}, f.clock.Now());
  f.catalog.Lease(id, SessionId{1}, f.clock.Now());
  f.catalog.Lease(id, SessionId{2}, f.clock.Now());
  f.catalog.EndSession(SessionId{1}, f.clock.Now());
  CHECK(f.catalog.Find(id)->leases == 1);
  CHECK(f.catalog.lease_count() == 1);
}

TEST_CASE("Catalog: a lease ends by the request that got it, once", "[unit]") {
  CatalogFixture f;
  const ModelId id = f.Add(1, 10, "/a");
  f.catalog.Lease(id, SessionId{1}, f.clock.Now(), 7);
  f.catalog.Lease(id, SessionId{2}, f.clock.Now(), 7);
  CHECK_FALSE(f.catalog.ReleaseOf(SessionId{1}, 8, f.clock.Now()));
  CHECK(f.catalog.ReleaseOf(SessionId{1}, 7, f.clock.Now()));
  CHECK_FALSE(f.catalog.ReleaseOf(SessionId{1}, 7, f.clock.Now()));
  CHECK(f.catalog.lease_count() == 1);
  f.catalog.EndSession(SessionId{2}, f.clock.Now());
  CHECK_FALSE(f.catalog.ReleaseOf(SessionId{2}, 7, f.clock.Now()));
}

TEST_CASE("Catalog: leased and pinned models are not evicted, and it says why", "[unit]") {
  CatalogFixture f;
  const ModelId id = f.Add(1, 10, "/a");
  f.catalog.Lease(id, SessionId{1}, f.clock.Now());
  f.catalog.Lease(id, SessionId{1}, f.clock.Now());
  f.catalog.SetPinned(id, true, f.clock.Now());
  const auto both = f.catalog.Evict(id, "test", f.clock.Now());
  REQUIRE_FALSE(both.ok());
  CHECK(both.error().code == ErrorCode::kInUse);
  CHECK_THAT(both.error().message, Contains("2 leases and a pin"));
  f.catalog.EndSession(SessionId{1}, f.clock.Now());
  CHECK_THAT(f.catalog.Evict(id, "test", f.clock.Now()).error().message, Contains("a pin"));
  f.catalog.SetPinned(id, false, f.clock.Now());
  CHECK(f.catalog.Evict(id, "test", f.clock.Now()).ok());
  CHECK(f.catalog.Find(id) == nullptr);
  CHECK(f.catalog.arenas().TakeUnused() == std::vector<ArenaId>{Numbered<ArenaId>(1)});
}

TEST_CASE("Catalog: memory of an evicted arena counts until its close is reported", "[unit]") {
  CatalogFixture f;
  f.Add(1, 600, "/a");
  REQUIRE(f.catalog.MakeRoom(900, 0, f.clock.Now()).ok());
  CHECK(f.catalog.arenas().closing_bytes() == 600);
  CHECK_FALSE(f.catalog.Fits(900));
  f.catalog.arenas().Closed(Numbered<ArenaId>(1));
  CHECK(f.catalog.Fits(900));
}

TEST_CASE("Catalog: room is refused with both numbers and nothing is evicted", "[unit]") {
  CatalogFixture f;
  const ModelId held = f.Add(1, 600, "/a");
  const ModelId free = f.Add(2, 100, "/b");
  f.catalog.Lease(held, SessionId{1}, f.clock.Now());
  const auto room = f.catalog.MakeRoom(500, 0, f.clock.Now());
  REQUIRE_FALSE(room.ok());
  CHECK(room.error().code == ErrorCode::kNoRoom);
  CHECK_THAT(room.error().message,
             Contains("500 bytes") && Contains("1000 bytes") && Contains("600"));
  CHECK(f.catalog.Find(free) != nullptr);
  CHECK(f.catalog.MakeRoom(5000, 0, f.clock.Now()).error().code == ErrorCode::kNoRoom);
}

TEST_CASE("Catalog: promised bytes are not given twice", "[unit]") {
  CatalogFixture f;
  CHECK(f.catalog.MakeRoom(600, 0, f.clock.Now()).ok());
  CHECK(f.catalog.MakeRoom(600, 600, f.clock.Now()).error().code == ErrorCode::kNoRoom);
  CHECK(f.catalog.MakeRoom(400, 600, f.clock.Now()).ok());
}

TEST_CASE("Catalog: the reason of a miss names the change", "[unit]") {
  CatalogFixture f;
  CHECK(f.catalog.RecordMiss(f.Want(1, 72), f.clock.Now()).kind == MissKind::kNeverLoaded);
  const auto changed = f.catalog.RecordMiss(f.Want(2, 69), f.clock.Now());
  CHECK(changed.kind == MissKind::kFileChanged);
  CHECK_THAT(changed.text, Contains("size of m.safetensors 72 -> 69 bytes"));
  f.catalog.history().Failed("/m.safetensors", {}, "needs 72, has 69", f.clock.Now());
  f.clock.Advance(seconds(3));
  const auto failed = f.catalog.RecordMiss(f.Want(2, 69), f.clock.Now());
  CHECK(failed.kind == MissKind::kFailedBefore);
  CHECK_THAT(failed.text, Contains("3.0 s ago") && Contains("needs 72, has 69"));
  f.catalog.history().Evicted("/m.safetensors", {}, "on request", f.clock.Now());
  const auto evicted = f.catalog.RecordMiss(f.Want(2, 69), f.clock.Now());
  CHECK(evicted.kind == MissKind::kEvicted);
  CHECK_THAT(evicted.text, Contains("on request"));
  Wanted other = f.Want(3, 69);
  other.options.format = "torch";
  CHECK(f.catalog.RecordMiss(other, f.clock.Now()).kind == MissKind::kOtherOptions);
  CHECK(f.catalog.counters().AllMisses() == 5);
}

TEST_CASE("Catalog: a superseded model goes at once, or when its last lease ends", "[unit]") {
  CatalogFixture f;
  const ModelId unused = f.Add(1, 72, "/m.safetensors");
  f.catalog.RecordMiss(f.Want(2, 69), f.clock.Now());
  CHECK(f.catalog.Find(unused) == nullptr);

  const ModelId used = f.Add(3, 72, "/m.safetensors");
  const LeaseId lease = f.catalog.Lease(used, SessionId{1}, f.clock.Now());
  f.catalog.RecordMiss(f.Want(4, 60), f.clock.Now());
  REQUIRE(f.catalog.Find(used) != nullptr);
  CHECK(f.catalog.Find(used)->superseded);
  f.catalog.Release(SessionId{1}, lease, f.clock.Now());
  CHECK(f.catalog.Find(used) == nullptr);
}

TEST_CASE("Catalog: a pin moves on to what supersedes the model", "[unit]") {
  CatalogFixture f;
  const ModelId pinned = f.Add(1, 72, "/m.safetensors");
  f.catalog.SetPinned(pinned, true, f.clock.Now());
  f.catalog.RecordMiss(f.Want(2, 69), f.clock.Now());
  CHECK(f.catalog.Find(pinned) == nullptr);
  CHECK(f.catalog.CarriesPin("/m.safetensors"));
  CHECK(f.catalog.Find(f.Add(2, 69, "/m.safetensors"))->pinned);
  CHECK_FALSE(f.catalog.CarriesPin("/m.safetensors"));
}

TEST_CASE("Catalog: the same path on another device supersedes nothing", "[unit]") {
  CatalogFixture f;
  const ModelId id = f.Add(1, 72, "/m.safetensors");
  Wanted wanted = f.Want(2, 72);
  wanted.files[0].stat.device = 99;
  f.catalog.RecordMiss(wanted, f.clock.Now());
  CHECK(f.catalog.Find(id) != nullptr);
}

TEST_CASE("Catalog: a superseded model whose file is back supersedes the other", "[unit]") {
  CatalogFixture f;
  const ModelId first = f.Add(1, 72, "/m.safetensors");
  f.catalog.Lease(first, SessionId{1}, f.clock.Now());
  f.catalog.RecordMiss(f.Want(2, 69), f.clock.Now());
  const ModelId second = f.Add(2, 69, "/m.safetensors");
  REQUIRE(f.catalog.Find(first)->superseded);
  f.catalog.Reinstate(first, f.clock.Now());
  CHECK_FALSE(f.catalog.Find(first)->superseded);
  CHECK(f.catalog.Find(second) == nullptr);
  CHECK(f.catalog.Resolve("/m.safetensors").value() == first);
}

TEST_CASE("Catalog: models that share a folder or a file are no versions of each other", "[unit]") {
  const auto file = [](const std::string& path, std::uint64_t inode) {
    return FileIdentity{path, path, FileStat{1, inode, 10, 20, 30}};
  };
  const std::vector<FileIdentity> full{file("/f/a.index.json", 1), file("/f/1", 2)};
  const std::vector<FileIdentity> half{file("/f/b.index.json", 3), file("/f/2", 4)};
  const std::vector<FileIdentity> alone{file("/f/a.index.json", 1)};
  CHECK_FALSE(Supersedes(half, full));
  CHECK_FALSE(Supersedes(alone, full));
  CHECK_FALSE(Supersedes(full, full));
  std::vector<FileIdentity> changed_shard = full;
  changed_shard[1].stat.inode = 9;
  CHECK(Supersedes(changed_shard, full));
  const std::vector<FileIdentity> changed_index{file("/f/a.index.json", 9)};
  CHECK(Supersedes(changed_index, full));
}

TEST_CASE("Arenas: an arena lives until its last user lets go and is counted once", "[unit]") {
  CatalogFixture f;
  f.Add(1, 300, "/a");
  ResidentModel borrower;
  borrower.id = Numbered<ModelId>(2);
  borrower.path = "/b";
  borrower.arenas = {{Numbered<ArenaId>(1), 3, 4, 300}};
  borrower.borrowed_arenas = 1;
  borrower.places = {{Numbered<ArenaId>(1), 0, 300, Digest{}}};
  f.catalog.Insert(borrower, f.clock.Now());
  CHECK(f.catalog.arenas().resident_bytes() == 300);
  CHECK(f.catalog.storages().payload_bytes() == 300);
  CHECK(f.catalog.Describe(*f.catalog.Find(borrower.id), f.clock.Now()).borrowed_bytes == 300);
  REQUIRE(f.catalog.Evict(Numbered<ModelId>(1), "test", f.clock.Now()).ok());
  CHECK(f.catalog.arenas().TakeUnused().empty());
  CHECK(f.catalog.storages().payload_bytes() == 300);
  REQUIRE(f.catalog.Evict(borrower.id, "test", f.clock.Now()).ok());
  CHECK(f.catalog.arenas().TakeUnused().size() == 1);
  CHECK(f.catalog.storages().payload_bytes() == 0);
}

TEST_CASE("StorageIndex: candidates agree in size and sample", "[unit]") {
  StorageIndex index;
  const auto arena = Numbered<ArenaId>(1);
  const auto sample = Numbered<Digest>(7);
  const std::vector<StoragePlace> places{{arena, 0, kMinSharedBytes, sample},
                                         {arena, 1U << 20U, 2 * kMinSharedBytes, sample},
                                         {arena, 1U << 21U, kMinSharedBytes - 1, sample},
                                         {arena, 1U << 22U, 0, sample}};
  index.Add(places);
  REQUIRE(index.Candidates(kMinSharedBytes, sample, 4).size() == 1);
  CHECK(index.Candidates(kMinSharedBytes, sample, 4)[0].offset_bytes == 0);
  CHECK(index.Candidates(kMinSharedBytes - 1, sample, 4).empty());  // too small to share
  CHECK(index.Candidates(kMinSharedBytes, Numbered<Digest>(8), 4).empty());
  index.Remove(places);
  CHECK(index.Candidates(kMinSharedBytes, sample, 4).empty());
  CHECK(index.payload_bytes() == 0);
}

TEST_CASE("StorageIndex: places of one model are distinct", "[unit]") {
  const auto arena = Numbered<ArenaId>(1);
  const std::vector<StoragePlace> places{
      {arena, 64, 10, {}}, {arena, 0, 10, {}}, {arena, 64, 10, {}}, {arena, 64, 0, {}}};
  CHECK(DistinctPlaces(places).size() == 2);
}

TEST_CASE("History: it is bounded per path and over paths", "[unit]") {
  FakeClock clock;
  History history;
  for (std::size_t i = 0; i < 2 * kMaxHistoryEvents; ++i) {
    history.Add("/a", "pin", std::to_string(i), clock.Now());
  }
  const auto events = history.Of("/a", clock.Now());
  CHECK(events.size() == kMaxHistoryEvents);
  CHECK(events.back().reason == std::to_string(2 * kMaxHistoryEvents - 1));
  for (std::size_t i = 0; i < kMaxHistoryPaths; ++i) {
    history.Add("/" + std::to_string(i), "pin", "", clock.Now());
  }
  CHECK(history.path_count() == kMaxHistoryPaths);
  CHECK(history.Of("/a", clock.Now()).empty());
}

TEST_CASE("History: hits in a row are one event", "[unit]") {
  FakeClock clock;
  History history;
  for (int i = 0; i < 1000; ++i) {
    history.Hit("/a", clock.Now());
  }
  const auto events = history.Of("/a", clock.Now());
  REQUIRE(events.size() == 1);
  CHECK_THAT(events[0].reason, Contains("1000 times"));
}

TEST_CASE("History: each way to read a file has a fate of its own", "[unit]") {
  CatalogFixture f;
  History history;
  Wanted automatic = f.Want(1, 72);
  Wanted torch = f.Want(2, 72);
  torch.options.format = "torch";
  history.Load(automatic, "", f.clock.Now());
  history.Load(torch, "", f.clock.Now());
  history.Evicted(automatic.path, automatic.options, "on request", f.clock.Now());
  history.Failed(torch.path, torch.options, "not a checkpoint", f.clock.Now());
  CHECK(history.ExplainMiss(automatic, f.clock.Now()).kind == MissKind::kEvicted);
  CHECK(history.ExplainMiss(torch, f.clock.Now()).kind == MissKind::kFailedBefore);
  CHECK(history.PathOf(automatic.id) == automatic.path);
  CHECK(history.PathOf(torch.id) == torch.path);
  Wanted changed = f.Want(3, 69);
  history.Load(changed, "", f.clock.Now());
  CHECK(history.PathOf(automatic.id).empty());
  changed.options.format = "torch";
  CHECK(history.ExplainMiss(changed, f.clock.Now()).kind == MissKind::kOtherOptions);
  for (std::size_t i = 0; i < 2 * kMaxHistoryOptions; ++i) {
    changed.options.device = "cuda:" + std::to_string(i);
    history.Load(changed, "", f.clock.Now());
  }
  CHECK(history.ExplainMiss(f.Want(3, 69), f.clock.Now()).kind == MissKind::kOtherOptions);
}

TEST_CASE("Identity: names count only among several files, options always", "[unit]") {
  const FileStat stat{1, 2, 3, 4, 5};
  const std::vector<FileRef> a{{"a", "/a"}};
  const std::vector<FileRef> b{{"b", "/b"}};
  const std::vector<FileStat> one{stat};
  CHECK(ComputeModelId(a, one, "auto", "cpu") == ComputeModelId(b, one, "auto", "cpu"));
  CHECK(ComputeModelId(a, one, "auto", "cpu") != ComputeModelId(a, one, "torch", "cpu"));
  CHECK(ComputeModelId(a, one, "auto", "cpu") != ComputeModelId(a, one, "auto", "cuda"));
  const std::vector<FileStat> two{stat, stat};
  const std::vector<FileRef> ab{{"a", "/a"}, {"b", "/b"}};
  const std::vector<FileRef> ba{{"b", "/b"}, {"a", "/a"}};
  CHECK(ComputeModelId(ab, two, "auto", "cpu") != ComputeModelId(ba, two, "auto", "cpu"));
  for (FileStat other : {FileStat{9, 2, 3, 4, 5}, FileStat{1, 9, 3, 4, 5}, FileStat{1, 2, 9, 4, 5},
                         FileStat{1, 2, 3, 9, 5}, FileStat{1, 2, 3, 4, 9}}) {
    CHECK(ComputeModelId(a, std::vector<FileStat>{other}, "auto", "cpu") !=
          ComputeModelId(a, one, "auto", "cpu"));
  }
  CHECK(DefaultName(ab) == "");  // the root folder
}

}  // namespace
}  // namespace modelcache
