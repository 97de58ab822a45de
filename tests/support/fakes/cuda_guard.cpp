// Lets a torch that was built without CUDA hold fake CUDA tensors: every operator's device guard needs an
// implementation, and this one does nothing.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>);
}
