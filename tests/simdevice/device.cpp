// A device with separate memory, for tests on machines without a GPU: "sim", torch's PrivateUse1.
//
// A device address is a host address with a bit set that makes it invalid for the processor: a host access to device
// memory ends with SIGSEGV. Operators run on the CPU's kernels, and refuse to mix host and device tensors, as CUDA does.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>

namespace {
constexpr auto SIM = c10::DeviceType::PrivateUse1;
constexpr uintptr_t FAR = uintptr_t{1} << 62;
const c10::Device DEVICE(SIM, 0);
const c10::Stream STREAM(c10::Stream::DEFAULT, DEVICE);

template <class T>
T* near(T* pointer) {
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(pointer) & ~FAR);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, &std::free, DEVICE};
    void* here = std::malloc(size);
    TORCH_CHECK(here != nullptr, "sim: out of memory");
    return {reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(here) | FAR), here, &std::free, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(near(to), near(from), size); }
};
Memory memory;
REGISTER_ALLOCATOR(SIM, &memory);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<SIM> {
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  c10::Stream getStream(c10::Device) const noexcept override { return STREAM; }
  c10::Stream getNewStream(c10::Device, int) const override { return STREAM; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return STREAM; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  bool isPinnedPtr(const void*) const override { return false; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto fresh = memory.allocate(size);
    if (auto kept = std::min(size, storage.nbytes())) memory.copy_data(fresh.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};
const bool hooked = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

// The CPU's view of a host or device tensor.
at::Tensor here(const at::Tensor& tensor) {
  if (tensor.device().type() != SIM) return tensor;
  auto* start = near(const_cast<char*>(static_cast<const char*>(tensor.storage().data())));
  start += tensor.storage_offset() * tensor.itemsize();
  return at::from_blob(start, tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  if (to.numel()) here(to).copy_(here(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  size_t needed = (self.numel() + self.storage_offset()) * self.itemsize();
  if (needed > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  return self;
}

at::Tensor& set(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.schema().name();
  bool far = false, close = false;
  for (const auto& argument : torch::jit::last(*stack, op.schema().arguments().size())) {
    std::vector<at::Tensor> tensors;
    if (argument.isTensor()) tensors = {argument.toTensor()};
    if (argument.isTensorList()) tensors = argument.toTensorVector();
    for (const auto& tensor : tensors) {
      if (!tensor.defined()) continue;
      far |= tensor.device().type() == SIM;
      // A tensor without dimensions may be on the host.
      close |= tensor.device().is_cpu() && tensor.dim() > 0;
    }
  }
  TORCH_CHECK(!(far && close), "Expected all tensors to be on the same device, but ", name, " got sim:0 and cpu");
  at::native::cpu_fallback(op, stack);
}
}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("resize_", &resize);
  m.impl("_local_scalar_dense", [](const at::Tensor& self) { return here(self).item(); });
  m.impl("view", [](const at::Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); });
  m.impl("unfold", &at::native::unfold);
  m.impl("_reshape_alias", [](const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
    return at::native::_reshape_alias(self, size, stride);
  });
  m.impl("as_strided", [](const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                          std::optional<int64_t> offset) {
    return at::native::as_strided_tensorimpl(self, size, stride, offset);
  });
  m.impl("set_.source_Storage_storage_offset", &set);
  m.impl("set_.source_Storage", [](at::Tensor& self, at::Storage source) -> at::Tensor& {
    int64_t size = source.nbytes() / self.itemsize();
    return set(self, std::move(source), 0, {size}, {1});
  });
  m.impl("set_.source_Tensor", [](at::Tensor& self, const at::Tensor& source) -> at::Tensor& {
    return set(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
  });
}
