// Lets a torch that was built without CUDA hold fake tensors on a CUDA device: the device guard of every operator asks
// for an implementation, and this one does nothing.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>);
}
