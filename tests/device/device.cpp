// A device on a CPU (PrivateUse1): memory of the CPU, an autograd thread of its own, streams whose copies run late, and
// a process group over gloo. tests/device/README.md says what it shows and what it cannot.
#include <ATen/CPUFunctions.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>

#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>

namespace {
using at::Tensor;
using Clock = uint64_t;
using Lock = std::unique_lock<std::mutex>;
constexpr auto P1 = c10::DeviceType::PrivateUse1;
const c10::Device DEVICE(P1, 0);

std::atomic<int64_t> delay_us{500};  // of a late copy, at most; below 0: it runs only when somebody waits for it
std::atomic<uint64_t> seed{0};
std::atomic<Clock> launched{0};  // operators that the default stream has begun
std::atomic<Clock> host_seen{0};  // those of them that the host has waited for: whatever is launched later comes after
thread_local int64_t current = 0;  // stream of this thread
thread_local int inside = 0;  // copies of the fallback itself

// ----- streams: 0 runs what it is given at once, others run copies late in threads of their own

struct Queue {
  explicit Queue(int64_t id) : id(id), draw(seed.load() + id) {}
  const int64_t id;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> jobs;
  uint64_t put = 0, done = 0, needed = 0;
  Clock seen = 0;  // operators of the default stream that this stream has waited for
  bool started = false;
  std::mt19937_64 draw;

  void add(std::function<void()> job) {
    Lock lock(mutex);
    if (!started) {
      started = true;
      std::thread(&Queue::serve, this).detach();
    }
    jobs.push_back(std::move(job));
    ++put;
    changed.notify_all();
  }
  void serve() {
    at::AutoDispatchBelowAutograd below;
    Lock lock(mutex);
    while (true) {
      changed.wait(lock, [&] { return !jobs.empty(); });
      auto waited_for = [&] { return needed > done; };
      if (int64_t most = delay_us; most < 0)
        changed.wait(lock, waited_for);
      else if (most > 0)
        changed.wait_for(lock, std::chrono::microseconds(draw() % (most + 1)), waited_for);
      auto job = std::move(jobs.front());
      jobs.pop_front();
      lock.unlock();
      job();
      job = nullptr;
      lock.lock();
      ++done;
      changed.notify_all();
    }
  }
  void wait(uint64_t until) {
    Lock lock(mutex);
    needed = std::max(needed, until);
    changed.notify_all();
    changed.wait(lock, [&] { return done >= until; });
  }
  void drain() {
    uint64_t all;
    {
      Lock lock(mutex);
      all = put;
    }
    wait(all);
  }
  bool reached(uint64_t until) {  // whoever asks again and again waits, too
    Lock lock(mutex);
    needed = std::max(needed, until);
    changed.notify_all();
    return done >= until;
  }
};

struct Queues {
  std::mutex mutex;
  std::vector<Queue*> all{new Queue(0)};  // never freed: their threads end with the process
  Queue& at(int64_t id) {
    Lock lock(mutex);
    return *all.at(id);
  }
  int64_t add() {
    Lock lock(mutex);
    all.push_back(new Queue(all.size()));
    return all.size() - 1;
  }
  std::vector<Queue*> every() {
    Lock lock(mutex);
    return all;
  }
};
Queues& queues = *new Queues;

void host_waits() { host_seen = std::max(host_seen.load(), launched.load()); }

void synchronize_stream(int64_t id) {
  Queue& queue = queues.at(id);
  queue.drain();
  host_seen = std::max(host_seen.load(), id ? queue.seen : launched.load());
}

void synchronize() {
  for (auto* queue : queues.every()) queue->drain();
  host_waits();
}

struct Event {
  int64_t stream = 0;
  uint64_t at = 0;
  Clock seen = 0;
};

// ----- memory: a freed block is handed out again at once, filled with NaN

struct Block {
  size_t bytes;
  int64_t stream;  // whose it is, as with CUDA's caching allocator
  bool host, live = false;
  Clock written = 0, used = 0;  // last operator of the default stream that wrote it, and that touched it
  std::set<int64_t> users;  // streams that must come to an end with it before it is handed out again
};

struct Memory {
  std::mutex mutex;
  std::map<char*, Block> blocks;
  std::map<std::tuple<bool, int64_t, size_t>, std::vector<char*>> free;
  std::map<const char*, size_t> registered;
  int64_t live = 0, peak = 0;
  int64_t reserved = 0;  // with blocks that nobody has, which are never given back
  int64_t limit = std::numeric_limits<int64_t>::max();

  char* take(size_t n, bool host) {
    if (n == 0) return nullptr;
    size_t bytes = (n + 511) / 512 * 512;
    int64_t stream = host ? 0 : current;
    char* data;
    {
      Lock lock(mutex);
      TORCH_CHECK_WITH(OutOfMemoryError, host || live + int64_t(bytes) <= limit, "the device is out of memory: ", bytes,
                       " bytes besides ", live, " are more than ", limit);
      auto& some = free[{host, stream, bytes}];
      if (some.empty()) {
        data = static_cast<char*>(aligned_alloc(512, bytes));
        TORCH_CHECK(data, "no memory for ", bytes, " bytes");
        blocks[data] = Block{bytes, stream, host};
        if (!host) reserved += bytes;
      } else {
        data = some.back();
        some.pop_back();
      }
      blocks[data].live = true;
      if (!host) peak = std::max(peak, live += bytes);
    }
    if (stream == 0)
      memset(data, 0xFF, bytes);
    else  // after what this stream still does with the block
      queues.at(stream).add([=] { memset(data, 0xFF, bytes); });
    return data;
  }
  void give(char* data) {
    Lock lock(mutex);
    Block& block = blocks.at(data);
    block.live = false;
    if (!block.host) live -= block.bytes;
    auto left = std::make_shared<std::atomic<size_t>>(block.users.size());
    for (int64_t user : block.users)
      queues.at(user).add([=] {
        if (--*left) return;
        Lock lock(mutex);
        Block& block = blocks.at(data);
        block.written = block.used = 0;  // all of them are done
        again(data, block);
      });
    if (block.users.empty()) again(data, block);
    block.users.clear();
  }
  void again(char* data, Block& block) {
    if (block.stream == 0) memset(data, 0xFF, block.bytes);  // whoever still reads it sees it
    free[{block.host, block.stream, block.bytes}].push_back(data);
  }
  Block* of(const void* data) {  // with the mutex
    auto next = blocks.upper_bound(static_cast<char*>(const_cast<void*>(data)));
    if (next == blocks.begin()) return nullptr;
    --next;
    return data < next->first + next->second.bytes ? &next->second : nullptr;
  }
  void used_by(const void* data, int64_t stream) {
    Lock lock(mutex);
    if (Block* block = of(data); block && stream != block->stream) block->users.insert(stream);
  }
  bool pinned(const void* data) {
    Lock lock(mutex);
    if (Block* block = of(data)) return block->host;
    auto next = registered.upper_bound(static_cast<const char*>(data));
    if (next == registered.begin()) return false;
    --next;
    return data < next->first + next->second;
  }
};
Memory& memory = *new Memory;

template <bool host>
struct Allocator final : c10::Allocator {
  static void give(void* data) { memory.give(static_cast<char*>(data)); }
  c10::DataPtr allocate(size_t n) override {
    void* data = memory.take(n, host);
    return {data, data, data ? &give : nullptr, host ? c10::Device(c10::kCPU) : DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
};
Allocator<false> device_allocator;
Allocator<true> pinned_allocator;
REGISTER_ALLOCATOR(P1, &device_allocator);

// ----- order between the default stream and the others: the default stream is never late, so what another stream must
// not yet read or overwrite is known from clocks alone. A copy that does so gives NaN.

std::mutex races_mutex;
std::vector<std::string> races;

void touch(const Tensor& t, bool writes, Clock now) {
  Lock lock(memory.mutex);
  if (Block* block = memory.of(t.unsafeGetTensorImpl()->storage().data())) {
    block->used = now;
    if (writes) block->written = now;
  }
}

bool too_early(const Tensor& t, bool writes, const std::string& what) {
  Clock seen = std::max(queues.at(current).seen, host_seen.load());
  Lock lock(memory.mutex);
  Block* block = memory.of(t.unsafeGetTensorImpl()->storage().data());
  if (!block || block->host || (writes ? block->used : block->written) <= seen) return false;
  std::ostringstream message;
  message << what << " on stream " << current << (writes ? " overwrites" : " reads") << " a tensor " << t.sizes()
          << " that the default stream may not have " << (writes ? "read" : "written") << " yet";
  Lock also(races_mutex);
  races.push_back(message.str());
  return true;
}

// ----- operators

bool on_device(const Tensor& t) { return t.defined() && t.device().type() == P1; }

// The same memory as a CPU tensor that keeps nothing alive: what a stream's thread drops last may need Python's lock,
// which the thread that waits for the stream may hold.
Tensor cpu_view(const Tensor& t) {
  return at::from_blob(t.numel() ? t.mutable_data_ptr() : nullptr, t.sizes(), t.strides(),
                       t.options().device(at::kCPU).requires_grad(false));
}

Tensor empty(c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

Tensor copy_from(const Tensor& source, const Tensor& to, bool non_blocking) {
  at::AutoDispatchBelowAutograd below;
  Tensor a = cpu_view(source), b = cpu_view(to);
  if (inside) {
    b.copy_(a);
    return to;
  }
  Queue& queue = queues.at(current);
  bool leaves = on_device(source) && !on_device(to), comes = on_device(to) && !on_device(source);
  bool pinned = (leaves && memory.pinned(to.data_ptr())) || (comes && memory.pinned(source.data_ptr()));
  if (leaves && !(pinned && non_blocking)) {  // the host waits
    queue.drain();
    if (current) too_early(source, false, "a copy");
    b.copy_(a);
    if (!current) host_waits();
    return to;
  }
  if (!current) {
    Clock now = ++launched;
    if (on_device(source)) touch(source, false, now);
    if (on_device(to)) touch(to, true, now);
    if (leaves) {  // late for the host alone: the device's own operators come after it
      memory.used_by(to.data_ptr(), 0);
      queue.add([a = a.clone(), b]() mutable { b.copy_(a); });
      return to;
    }
    if (comes) queue.drain();
    b.copy_(a);
    return to;
  }
  bool poison = on_device(source) && too_early(source, false, "a copy");
  poison |= on_device(to) && too_early(to, true, "a copy");
  if (comes && !pinned) a = a.clone();  // CUDA stages what is not pinned before it returns
  if (pinned) memory.used_by(leaves ? to.data_ptr() : source.data_ptr(), current);
  queue.add([a, b, poison]() mutable {
    if (!poison)
      b.copy_(a);
    else if (b.is_floating_point())
      b.fill_(std::numeric_limits<double>::quiet_NaN());
    else
      b.fill_(-1);
  });
  if (comes && !non_blocking) queue.drain();
  return to;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& to) {
  to.resize_(source.sizes());
  return copy_from(source, to, false);
}

c10::Scalar local_scalar(const Tensor& t) {
  synchronize_stream(current);
  return cpu_view(t).item();
}

Tensor as_strided(const Tensor& t, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(t, size, stride, offset);
}
Tensor unfold(const Tensor& t, int64_t d, int64_t size, int64_t step) { return at::native::unfold(t, d, size, step); }
const Tensor& resize(const Tensor& t, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format) {
  return at::native::resize_(t, C10_AS_INTARRAYREF_SLOW(size), format);
}
Tensor& set_storage(Tensor& t, at::Storage storage) {
  int64_t n = storage.nbytes() / t.itemsize();
  return at::cpu::set_(t, storage, 0, {n}, {1});
}
Tensor& set_part(Tensor& t, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::cpu::set_(t, storage, offset.guard_int(__FILE__, __LINE__), C10_AS_INTARRAYREF_SLOW(size),
                       C10_AS_INTARRAYREF_SLOW(stride));
}
Tensor& set_tensor(Tensor& t, const Tensor& source) {
  return at::cpu::set_(t, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
Tensor& set_empty(Tensor& t) {
  at::Storage storage(at::Storage::use_byte_size_t(), 0, &device_allocator, true);
  return at::cpu::set_(t, storage, 0, {0}, {1});
}
void record_stream(Tensor& t, at::Stream stream) { memory.used_by(t.storage().data(), stream.id()); }

std::tuple<Tensor, Tensor> native_dropout(const Tensor& x, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {x.clone(), at::ones_like(x, x.options().dtype(at::kBool))};
  Tensor noise = at::empty_like(x).bernoulli_(1 - p);
  Tensor mask = noise.to(at::kBool);
  return {p == 1 ? at::zeros_like(x) : x.mul(noise.div_(1 - p)), mask};
}

Tensor convolution(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, c10::IntArrayRef stride,
                   c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef more, int64_t groups) {
  std::optional<Tensor> b;
  if (bias && bias->defined()) b = bias->cpu();
  return at::convolution(x.cpu(), weight.cpu(), b, stride, padding, dilation, transposed, more, groups).to(DEVICE);
}
std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& x, const Tensor& weight, c10::IntArrayRef stride, c10::IntArrayRef padding,
    c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef more, int64_t groups, std::array<bool, 3> wanted) {
  int64_t channels = weight.size(transposed ? 1 : 0) * (transposed ? groups : 1);
  auto [gx, gw, gb] = at::convolution_backward(grad.cpu(), x.cpu(), weight.cpu(), {{channels}}, stride, padding, dilation,
                                               transposed, more, groups, wanted);
  auto here = [](const Tensor& t) { return t.defined() ? t.to(DEVICE) : t; };
  return {here(gx), here(gw), here(gb)};
}

int64_t sdp_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                   std::optional<double>, bool) {
  return 0;  // the formulas
}

struct Generator final : c10::GeneratorImpl {
  at::Generator cpu = at::detail::createCPUGenerator();
  Generator() : GeneratorImpl(DEVICE, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t s) override { cpu.set_current_seed(s); }
  void set_offset(uint64_t offset) override { cpu.set_offset(offset); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override {
    auto* made = new Generator();
    made->cpu = cpu.clone();
    return made;
  }
};
const at::Generator& default_generator() {
  static auto& made = *new at::Generator(c10::make_intrusive<Generator>());
  return made;
}

bool takes_generator(const c10::Argument& argument) {
  auto type = argument.type();
  if (type->kind() == c10::TypeKind::OptionalType) type = type->castRaw<c10::OptionalType>()->getElementType();
  return type->kind() == c10::TypeKind::GeneratorType;
}

void each_tensor(const c10::IValue& value, const std::function<void(const Tensor&)>& see) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) see(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) each_tensor(item, see);
  }
}

const std::set<std::string> MIXED{"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"};

// Every operator that is not here: the CPU's, on copies.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  const Tensor* other = nullptr;
  bool here = false;
  std::vector<std::pair<Tensor, bool>> seen;
  for (size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue& value = (*stack)[first + i];
    bool writes = arguments[i].alias_info() && arguments[i].alias_info()->isWrite();
    each_tensor(value, [&](const Tensor& t) {
      if (on_device(t)) {
        here = true;
        seen.emplace_back(t, writes);
      } else if (t.dim() > 0) {
        other = &t;
      }
    });
    if (takes_generator(arguments[i])) {
      at::Generator given = value.isNone() ? default_generator() : value.toGenerator();
      TORCH_CHECK(given.device().type() == P1, "Expected a '", DEVICE, "' generator device but found '", given.device(), "'");
      value = static_cast<Generator*>(given.unsafeGetGeneratorImpl())->cpu;
    }
  }
  TORCH_CHECK(!here || !other || MIXED.count(op.schema().name()),
              "Expected all tensors to be on the same device, but found at least two devices, ", DEVICE, " and cpu! (",
              op.schema().name(), ")");
  Clock now = 0;
  if (current) {
    queues.at(current).drain();
    for (auto& [t, writes] : seen) too_early(t, writes, op.schema().name());
  } else {
    now = ++launched;
    for (auto& [t, writes] : seen) touch(t, writes, now);
  }
  seen.clear();
  ++inside;
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    --inside;
    throw;
  }
  --inside;
  if (!current)
    for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i)
      each_tensor((*stack)[i], [&](const Tensor& t) {
        if (on_device(t)) touch(t, true, now);
      });
}

// ----- what PyTorch asks of a device

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, DEVICE, id); }
  c10::DeviceType type() const override { return P1; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(queues.add()); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(queues.add()); }
  c10::Stream exchangeStream(c10::Stream to) const override {
    auto before = stream(current);
    current = to.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& on, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Event();
    Queue& queue = queues.at(on.id());
    Lock lock(queue.mutex);
    *static_cast<Event*>(*event) = {queue.id, queue.put, queue.id ? queue.seen : launched.load()};
  }
  void block(void* event, const c10::Stream& on) const override {
    if (!event) return;
    const Event e = *static_cast<Event*>(event);
    if (on.id() == 0) return queues.at(e.stream).wait(e.at);  // never late: so the host waits
    Queue& queue = queues.at(on.id());
    queue.seen = std::max(queue.seen, e.seen);
    if (e.stream != on.id()) queue.add([e] { queues.at(e.stream).wait(e.at); });
  }
  bool queryEvent(void* event) const override {
    auto* e = static_cast<Event*>(event);
    return !e || queues.at(e->stream).reached(e->at);
  }
  bool queryStream(const c10::Stream& s) const override {
    Queue& queue = queues.at(s.id());
    return queue.reached(queue.put);
  }
  void synchronizeStream(const c10::Stream& s) const override { synchronize_stream(s.id()); }
  void synchronizeEvent(void* event) const override {
    auto* e = static_cast<Event*>(event);
    if (!e) return;
    queues.at(e->stream).wait(e->at);
    host_seen = std::max(host_seen.load(), e->seen);
  }
  void synchronizeDevice(c10::DeviceIndex) const override { synchronize(); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    memory.used_by(data.get(), s.id());
  }
  double elapsedTime(void*, void*, c10::DeviceIndex) const override { return 0.0; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::Generator(c10::make_intrusive<Generator>()); }
  at::Device getDeviceFromPtr(void*) const override { return DEVICE; }
  bool isPinnedPtr(const void* data) const override { return memory.pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), bytes);
  }
};

// ----- a process group: gloo, on views of the device's memory

struct Call {
  std::string group, op;
  bool device;
};
std::mutex calls_mutex;
std::vector<Call> calls;
std::atomic<int64_t> call_delay_us{0};

using Tensors = std::vector<Tensor>;

Tensors views(const Tensors& some) {
  Tensors made;
  for (auto& t : some) made.push_back(cpu_view(t));
  return made;
}
std::vector<Tensors> views(const std::vector<Tensors>& some) {
  std::vector<Tensors> made;
  for (auto& t : some) made.push_back(views(t));
  return made;
}

struct LateWork final : c10d::Work {
  LateWork(c10::intrusive_ptr<c10d::Work> work, Tensors outputs, Tensors kept)
      : work(std::move(work)), outputs(std::move(outputs)), kept(std::move(kept)) {}
  c10::intrusive_ptr<c10d::Work> work;
  Tensors outputs, kept;
  bool isCompleted() override { return work->isCompleted(); }
  bool isSuccess() const override { return work->isSuccess(); }
  std::exception_ptr exception() const override { return work->exception(); }
  int sourceRank() const override { return work->sourceRank(); }
  Tensors result() override { return outputs; }
  void synchronize() override { work->wait(); }
  bool wait(std::chrono::milliseconds timeout) override { return work->wait(timeout); }
  void blockCurrentStream() override { work->wait(); }
  void abort() override { work->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto made = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                         std::vector<c10::Device>{DEVICE});
    work->getFuture()->addCallback([made, outputs = outputs](c10::ivalue::Future& done) {
      if (done.hasError())
        made->setError(done.exception_ptr());
      else
        made->markCompleted(c10::IValue(outputs));
    });
    return made;
  }
};

struct LateBackend final : c10d::Backend {
  using Result = c10::intrusive_ptr<c10d::Work>;
  c10::intrusive_ptr<c10d::Backend> gloo;
  std::string name;
  std::mutex mutex;
  std::mt19937_64 draw;

  LateBackend(c10::intrusive_ptr<c10d::Backend> inner, std::string name)
      : Backend(inner->getRank(), inner->getSize()), gloo(inner), name(name), draw(seed.load() + inner->getRank()) {}
  const std::string getBackendName() const override { return "late"; }

  void note(const char* op, const Tensors& tensors) {
    bool device = false;
    for (auto& t : tensors) device |= on_device(t);
    if (int64_t most = call_delay_us; most > 0) {
      uint64_t us;
      {
        Lock lock(mutex);
        us = draw() % (most + 1);
      }
      std::this_thread::sleep_for(std::chrono::microseconds(us));
    }
    if (current) queues.at(current).drain();  // a collective comes after its stream's copies
    Lock lock(calls_mutex);
    calls.push_back({name, op, device});
  }
  static Tensors join(std::initializer_list<Tensors> some) {
    Tensors made;
    for (auto& t : some) made.insert(made.end(), t.begin(), t.end());
    return made;
  }
  static Tensors flat(const std::vector<Tensors>& some) {
    Tensors made;
    for (auto& t : some) made.insert(made.end(), t.begin(), t.end());
    return made;
  }
  Result done(Result work, Tensors outputs, Tensors inputs = {}) {
    return c10::make_intrusive<LateWork>(work, std::move(outputs), std::move(inputs));
  }
  Result broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    note("broadcast", t);
    auto v = views(t);
    return done(gloo->broadcast(v, o), t);
  }
  Result allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    note("allreduce", t);
    auto v = views(t);
    return done(gloo->allreduce(v, o), t);
  }
  Result allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& o) override {
    note("allreduce_coalesced", t);
    auto v = views(t);
    return done(gloo->allreduce_coalesced(v, o), t);
  }
  Result reduce(Tensors& t, const c10d::ReduceOptions& o) override {
    note("reduce", t);
    auto v = views(t);
    return done(gloo->reduce(v, o), t);
  }
  Result allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    note("allgather", in);
    auto a = views(out);
    auto b = views(in);
    return done(gloo->allgather(a, b, o), flat(out), in);
  }
  Result _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
    note("allgather_base", {in});
    Tensor a = cpu_view(out), b = cpu_view(in);
    return done(gloo->_allgather_base(a, b, o), {out}, {in});
  }
  Result allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    note("allgather_into_tensor_coalesced", in);
    auto a = views(out), b = views(in);
    return done(gloo->allgather_into_tensor_coalesced(a, b, o), out, in);
  }
  Result gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& o) override {
    note("gather", in);
    auto a = views(out);
    auto b = views(in);
    return done(gloo->gather(a, b, o), flat(out), in);
  }
  Result scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& o) override {
    note("scatter", out);
    auto a = views(out);
    auto b = views(in);
    return done(gloo->scatter(a, b, o), out, flat(in));
  }
  Result reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& o) override {
    note("reduce_scatter", flat(in));
    auto a = views(out);
    auto b = views(in);
    return done(gloo->reduce_scatter(a, b, o), out, flat(in));
  }
  Result _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& o) override {
    note("reduce_scatter_base", {in});
    Tensor a = cpu_view(out), b = cpu_view(in);
    return done(gloo->_reduce_scatter_base(a, b, o), {out}, {in});
  }
  Result alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& to, std::vector<int64_t>& from,
                       const c10d::AllToAllOptions& o) override {
    note("alltoall_base", {in});
    Tensor a = cpu_view(out), b = cpu_view(in);
    return done(gloo->alltoall_base(a, b, to, from, o), {out}, {in});
  }
  Result alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& o) override {
    note("alltoall", in);
    auto a = views(out), b = views(in);
    return done(gloo->alltoall(a, b, o), out, in);
  }
  Result send(Tensors& t, int to, int tag) override {
    note("send", t);
    auto v = views(t);
    return done(gloo->send(v, to, tag), t);
  }
  Result recv(Tensors& t, int from, int tag) override {
    note("recv", t);
    auto v = views(t);
    return done(gloo->recv(v, from, tag), t);
  }
  Result barrier(const c10d::BarrierOptions& o) override {
    note("barrier", {});
    synchronize();
    return gloo->barrier(o);
  }
  void setSequenceNumberForGroup() override { gloo->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo->getSequenceNumberForGroup(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo->setTimeout(timeout); }
};

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("as_strided", &as_strided);
  m.impl("unfold", &unfold);
  m.impl("view", [](const Tensor& t, c10::IntArrayRef size) { return at::native::view(t, size); });
  m.impl("_reshape_alias", [](const Tensor& t, c10::IntArrayRef size, c10::IntArrayRef stride) {
    return at::native::_reshape_alias(t, size, stride);
  });
  m.impl("view_as_real", [](const Tensor& t) { return at::native::view_as_real(t); });
  m.impl("view_as_complex", [](const Tensor& t) { return at::native::view_as_complex(t); });
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_part);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_empty);
  m.impl("record_stream", &record_stream);
  m.impl("native_dropout", &native_dropout);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}
}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sdp_choice);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  auto free_gil = py::call_guard<py::gil_scoped_release>();
  m.def("init", [] { at::RegisterPrivateUse1HooksInterface(new Hooks()); });
  m.def("set_late", [](int64_t delay, uint64_t s) {
    synchronize();
    delay_us = delay;
    seed = s;
    for (auto* queue : queues.every()) {
      Lock lock(queue->mutex);
      queue->draw.seed(s + queue->id);
    }
  }, free_gil);
  m.def("synchronize", &synchronize, free_gil);
  m.def("memory", [] {
    Lock lock(memory.mutex);
    return std::make_tuple(memory.live, memory.peak, memory.reserved);
  });
  m.def("set_limit", [](int64_t bytes) {
    Lock lock(memory.mutex);
    memory.limit = bytes;
  });
  m.def("reset_peak", [] {
    Lock lock(memory.mutex);
    memory.peak = memory.live;
  });
  m.def("host_register", [](uintptr_t data, size_t bytes) {
    Lock lock(memory.mutex);
    memory.registered[reinterpret_cast<const char*>(data)] = bytes;
  });
  m.def("host_unregister", [](uintptr_t data) {
    synchronize();  // what is queued would touch memory that is gone
    Lock lock(memory.mutex);
    memory.registered.erase(reinterpret_cast<const char*>(data));
  }, free_gil);
  m.def("default_generator", [] { return default_generator(); });
  m.def("races", [] {
    Lock lock(races_mutex);
    return std::exchange(races, {});
  });
  m.def("backend", [](c10::intrusive_ptr<c10d::Backend> gloo, std::string name) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<LateBackend>(gloo, name);
  });
  m.def("set_call_delay", [](int64_t us) { call_delay_us = us; });
  m.def("calls", [] {
    Lock lock(calls_mutex);
    std::vector<std::tuple<std::string, std::string, bool>> made;
    for (auto& c : calls) made.emplace_back(c.group, c.op, c.device);
    calls.clear();
    return made;
  });
}
