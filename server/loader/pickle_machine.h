// The stack machine behind ReadPickle.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "common/result.h"
#include "server/loader/byte_budget.h"
#include "server/loader/pickle.h"

namespace modelcache {

// Runs one stream once. Not synchronised; `bytes` must outlive it.
class PickleMachine {
 public:
  explicit PickleMachine(std::string_view bytes);

  // Errors: as ReadPickle.
  Result<PickleDocument> Run();

 private:
  // False: failed, see error_. So do all functions below that answer bool.
  using Handler = bool (*)(PickleMachine&);
  using Table = std::array<Handler, 256>;
  static const Table& Handlers();
  static void AddStackHandlers(Table& table);
  static void AddValueHandlers(Table& table);
  static void AddContainerHandlers(Table& table);
  static void AddObjectHandlers(Table& table);

  // Input.
  bool Take(std::uint64_t size_bytes, std::string_view& out);
  template <typename Number>
  bool TakeNumber(Number& out);
  template <typename Length>
  bool TakeCounted(std::string_view& out);
  bool TakeLine(std::string_view& out);

  // Nodes and the stack.
  PickleNode& Node(PickleRef ref) { return document_.nodes[ref]; }
  bool Push(PickleRef ref);
  bool Charge(const PickleNode& made);
  bool PushNew(PickleNode node);
  bool PushText(PickleKind kind, std::string_view text);
  bool PushInt(std::int64_t value);
  bool PushItems(PickleKind kind, std::size_t count);
  bool Pop(PickleRef& out);
  bool PopMark(std::size_t& count);  // items above the mark; the mark goes
  bool Top(PickleRef& out);
  bool Remember(std::uint64_t key);
  bool Recall(std::uint64_t key);
  bool PushLong(std::string_view little_endian);
  bool PushGlobal(std::string_view module, std::string_view name);

  // Containers and objects.
  bool AppendTo(std::size_t count);
  bool SetItemsOf(std::size_t count);
  bool Construct(PickleRef callable, PickleRef arguments);
  bool BuiltinCall(const std::string& callable, const std::vector<PickleRef>& arguments,
                   PickleNode& out);
  bool FillPairs(PickleRef source, PickleNode& dict);

  // Opcodes with more than a line of meaning.
  template <typename Key>
  bool TakeKey();
  template <typename Number>
  bool OpInt();
  template <typename Length>
  bool OpLong();
  template <typename Length>
  bool OpText(PickleKind kind);
  bool OpProto();
  bool OpStop();
  bool OpFloat();
  bool OpStackGlobal();
  bool OpGlobal();
  bool OpReduce();
  bool OpNewObject();
  bool OpNewObjectEx();
  bool OpInst();
  bool OpBuild();
  bool OpPersistent();
  bool OpMemoize();
  bool OpDict();
  bool OpPopMark();
  bool OpPop();
  bool OpDup();
  bool OpFrame();

  bool Fail(std::string message, ErrorCode code = ErrorCode::kBadFile);

  std::string_view bytes_;
  std::size_t at_ = 0;
  std::size_t opcode_at_ = 0;
  bool stopped_ = false;
  std::uint64_t key_ = 0;  // operand of the memo opcode at hand
  PickleDocument document_;
  std::vector<PickleRef> stack_;
  std::vector<std::size_t> marks_;
  std::unordered_map<std::uint64_t, PickleRef> memo_;
  ByteBudget budget_;
  Error error_;
};

}  // namespace modelcache
