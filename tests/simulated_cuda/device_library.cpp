// What torch's C++ code asks of a CUDA device, answered in a build of torch without CUDA.
//
// Three registrations, each of which a CUDA build of torch makes itself (where, as of torch 2.13):
// - a device guard, which autograd asks for streams and devices (c10/cuda/impl/CUDAGuardImpl.h);
// - CUDA's hooks, for generators and pinned memory (ATen/cuda/detail/CUDAHooks.cpp);
// - the choice among the kernels of scaled_dot_product_attention
//   (ATen/native/transformers/cuda/sdp_utils.cpp), reduced to the rules that matter here.
// A new version of torch may add pure virtual functions to the first two: then this file does not
// compile, and what depends on it is skipped with the compiler's message.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/SDPBackend.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr c10::DeviceIndex kDevices = 8;
thread_local c10::DeviceIndex current_device = 0;

struct DeviceGuard final : c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  using Index = c10::DeviceIndex;
  using Stream = c10::Stream;
  static Index index_of(Device device) { return device.index() < 0 ? current_device : device.index(); }

  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  Index deviceCount() const noexcept override { return kDevices; }
  Device getDevice() const override { return Device(c10::DeviceType::CUDA, current_device); }
  void setDevice(Device device) const override { current_device = index_of(device); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = index_of(device); }
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }

  // There is one stream, on which everything is finished at once.
  Stream getStream(Device device) const noexcept override {
    return Stream(Stream::DEFAULT, Device(c10::DeviceType::CUDA, index_of(device)));
  }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getStream(device); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const noexcept override { return getStream(stream.device()); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(Index) const override {}

  void record(void** event, const Stream&, Index, c10::EventFlag) const override {
    static int recorded;
    *event = &recorded;
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, Index) const noexcept override {}
};
c10::impl::DeviceGuardImplRegistrar guard(c10::DeviceType::CUDA, new DeviceGuard());

int64_t choose_attention(const at::Tensor& query, const at::Tensor&, const at::Tensor& value,
                         const std::optional<at::Tensor>& mask, double, bool, std::optional<double>,
                         bool grouped) {
  const bool is_half = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  const bool same_sizes = query.size(-1) == value.size(-1);
  if (is_half && same_sizes && !mask.has_value() && query.size(-1) <= 256)
    return static_cast<int64_t>(at::SDPBackend::flash_attention);
  return static_cast<int64_t>(grouped ? at::SDPBackend::math : at::SDPBackend::efficient_attention);
}
const bool choice = [] {
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
  return true;
}();

}  // namespace

namespace at {

struct SimulatedCudaHooks final : CUDAHooksInterface {
  explicit SimulatedCudaHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  int getNumGPUs() const override { return kDevices; }
  DeviceIndex current_device() const override { return current_device_(); }
  DeviceIndex getCurrentDevice() const override { return current_device_(); }
  void setCurrentDevice(DeviceIndex index) const override { ::current_device = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    auto before = ::current_device;
    ::current_device = index;
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetDefaultCPUAllocator(); }
  const Generator& getDefaultGenerator(DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void deviceSynchronize(DeviceIndex) const override {}

 private:
  static DeviceIndex current_device_() { return ::current_device; }
};
// The registry's first entry of this name wins; a build without CUDA has none.
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, SimulatedCudaHooks)

}  // namespace at
