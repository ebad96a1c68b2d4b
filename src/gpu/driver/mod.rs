//! The driver: one device with one stream, memory, kernels, graphs and events. Every call that can fail says what it was
//! doing; nothing here knows the model.

mod event;
mod function;
mod graph;
mod memory;
mod shared;
mod version;

pub use event::Event;
pub use function::{Call, Function, Kernels};
pub use graph::Graph;
pub use memory::{Buffer, Pinned};
pub use shared::DeviceMemory;

use std::{ffi::c_int, rc::Rc};

use cudarc::driver::{
    result::{self, DriverError, stream::StreamKind},
    sys,
};

use crate::{
    error::{Error, Result},
    plan::Card,
};

/// The oldest driver that loads what nvcc 13.0 makes.
const MIN_DRIVER: c_int = 13_000;
/// Major compute capabilities that build.rs compiles for.
const MAJORS: [i32; 4] = [8, 9, 10, 12];

/// The first GPU, its primary context, current on the thread that opened it, and the one stream that all work goes to.
/// It stays on that thread, and so does everything made by it.
#[derive(Clone)]
pub struct Device(Rc<Context>);

struct Context {
    device: sys::CUdevice,
    stream: sys::CUstream,
    /// What the kernels are written for: the card's, but for a build that takes it for an older one.
    capability: (i32, i32),
}

/// Kernels may start before the ones ahead of them end, and wait for them by themselves, from this major compute capability
/// on; code for older cards does not wait.
const DEPENDENT_LAUNCH_MAJOR: i32 = 9;

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the stream was created and the device's context retained once, by `Device::open`; whatever used them
        // held a clone of the device. Nothing can be done about a failure here; the process keeps what it could not free.
        unsafe {
            let _ = result::stream::destroy(self.stream);
            let _ = result::primary_ctx::release(self.device);
        }
    }
}

impl Device {
    /// Opens device 0. Errors: [`Error::Unavailable`] without a driver, with one that is too old, without a GPU, or with
    /// one that this build has no code for; each says what was found and what is needed.
    pub fn open() -> Result<Self> {
        let missing = |why: String| Error::Unavailable { what: "device cuda".into(), why };
        // SAFETY: this only tries to load libcuda, whose initialisers may run at any time. cudarc panics when a later
        // call does not find it, so this comes first.
        if !unsafe { sys::is_culib_present() } {
            let needed = cuda_version(MIN_DRIVER);
            return Err(missing(format!(
                "no CUDA driver (libcuda) is installed, one for CUDA {needed} or newer is needed"
            )));
        }
        let version = driver_version().map_err(|e| missing(describe(e)))?;
        if version < MIN_DRIVER {
            let (found, needed) = (cuda_version(version), cuda_version(MIN_DRIVER));
            return Err(missing(format!("the driver is for CUDA {found}, {needed} or newer is needed")));
        }
        let device = result::init().and_then(|()| result::device::get(0)).map_err(|e| missing(describe(e)))?;
        let (major, minor) = capability(device).map_err(failed("asking the GPU's compute capability"))?;
        if !MAJORS.contains(&major) {
            let name = result::device::get_name(device).map_err(failed("asking the GPU's name"))?;
            let needed = "8.x, 9.0, 10.x or 12.x is needed";
            return Err(missing(format!("{name} has compute capability {major}.{minor}, {needed}")));
        }
        // SAFETY: the device was returned by `device::get`.
        let context = unsafe { result::primary_ctx::retain(device) }.map_err(failed("opening the GPU"))?;
        // SAFETY: the context was retained above, and is released below or by `Context`.
        let stream = unsafe { result::ctx::set_current(context) }
            .and_then(|()| result::stream::create(StreamKind::NonBlocking))
            .map_err(|error| {
                // SAFETY: retained once above.
                let _ = unsafe { result::primary_ctx::release(device) };
                failed("opening the GPU")(error)
            })?;
        let capability = written_for().unwrap_or((major, minor));
        Ok(Self(Rc::new(Context { device, stream, capability })))
    }

    /// What the driver calls it.
    pub fn name(&self) -> Result<String> {
        result::device::get_name(self.0.device).map_err(failed("asking the GPU's name"))
    }

    /// Its compute capability, such as (9, 0); in a build that takes cards for older ones, theirs.
    pub fn capability(&self) -> (i32, i32) {
        self.0.capability
    }

    /// Whether a launch may ask to start before the kernels ahead of it end.
    fn has_dependent_launch(&self) -> bool {
        self.0.capability.0 >= DEPENDENT_LAUNCH_MAJOR
    }

    /// The driver's version, such as "580.159.04"; where the system does not tell, the newest CUDA that it serves, such as
    /// "CUDA 13.0".
    pub fn driver(&self) -> Result<String> {
        let served = || driver_version().map_err(failed("asking the driver's version"));
        version::installed().map_or_else(|| Ok(format!("CUDA {}", cuda_version(served()?))), Ok)
    }

    /// What a plan needs to know of it.
    pub fn card(&self) -> Result<Card> {
        use sys::CUdevice_attribute::{
            CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN as SHARED,
            CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as PROCESSORS,
        };
        // SAFETY: the device was returned by `device::get`.
        let [processors, shared] =
            [PROCESSORS, SHARED].map(|attribute| unsafe { result::device::get_attribute(self.0.device, attribute) });
        let count = |found: Result<c_int, DriverError>| {
            found.map(|count| count as usize).map_err(failed("asking for the GPU's multiprocessors and shared memory"))
        };
        Ok(Card { processors: count(processors)?, major: self.0.capability.0, block_shared_bytes: count(shared)? })
    }

    /// Bytes of its memory that are free now, and in all.
    pub fn memory(&self) -> Result<(u64, u64)> {
        let (free, total) = result::mem_get_info().map_err(failed("asking for free GPU memory"))?;
        Ok((free as u64, total as u64))
    }

    /// Waits until all queued work has ended. An error of an earlier kernel comes out here; `what` names the work.
    pub fn synchronize(&self, what: &str) -> Result<()> {
        // SAFETY: the stream lives as long as `self`.
        unsafe { result::stream::synchronize(self.0.stream) }.map_err(failed(what))
    }

    fn stream(&self) -> sys::CUstream {
        self.0.stream
    }
}

fn driver_version() -> Result<c_int, DriverError> {
    let mut version = 0;
    // SAFETY: `version` is valid for one write; this call is allowed before cuInit.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }.result()?;
    Ok(version)
}

/// 13010 is "13.1".
fn cuda_version(version: c_int) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

fn capability(device: sys::CUdevice) -> Result<(i32, i32), DriverError> {
    use sys::CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
    };
    // SAFETY: the device was returned by `device::get`.
    unsafe { Ok((result::device::get_attribute(device, MAJOR)?, result::device::get_attribute(device, MINOR)?)) }
}

/// What build.rs was told to write all kernels for, in place of the card's own.
fn written_for() -> Option<(i32, i32)> {
    let (major, minor) = option_env!("FLINT_RS_WRITTEN_FOR")?.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

fn describe(error: DriverError) -> String {
    match (error.error_name(), error.error_string()) {
        (Ok(name), Ok(text)) => format!("{} ({})", text.to_string_lossy(), name.to_string_lossy()),
        _ => format!("{:?}", error.0),
    }
}

fn failed(what: &str) -> impl FnOnce(DriverError) -> Error + '_ {
    move |error| Error::Device { what: what.into(), why: describe(error) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_read_as_people_write_them() {
        assert_eq!(cuda_version(13_000), "13.0");
        assert_eq!(cuda_version(12_090), "12.9");
        assert_eq!(cuda_version(13_010), "13.1");
    }
}
