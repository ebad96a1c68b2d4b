//! Device, memory, modules, and the one launch function.

use std::{
    cell::Cell,
    ffi::{c_int, c_void},
    mem::MaybeUninit,
    ptr,
    rc::Rc,
};

use cudarc::driver::{
    result::{self, DriverError},
    sys,
};

use super::Fatbin;
use crate::{
    error::{Error, Result},
    kernels::{Kernel, Launch},
};

/// The oldest driver that loads what nvcc 13.0 makes.
const MIN_DRIVER: c_int = 13_000;
/// Dynamic shared memory that every kernel may use without asking.
const DEFAULT_SHARED_BYTES: u32 = 48 << 10;

/// The first GPU and its primary context, current on the thread that opened it; stays on that thread.
#[derive(Clone)]
pub struct Device(Rc<Context>);

struct Context(sys::CUdevice);

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the device was returned by `device::get`, and its context was retained once by `Device::open`.
        // Nothing can be done about a failure here; the process keeps the context.
        let _ = unsafe { result::primary_ctx::release(self.0) };
    }
}

impl Device {
    /// Opens device 0. Errors: [`Error::Unavailable`] without a driver, with one that is too old, or without a GPU.
    pub fn open() -> Result<Self> {
        let missing = |why: String| Error::Unavailable { what: "device cuda".into(), why };
        // SAFETY: this only tries to load libcuda, whose initialisers may run at any time. cudarc panics when a later
        // call does not find it, so this comes first.
        if !unsafe { sys::is_culib_present() } {
            return Err(missing("no CUDA driver (libcuda) is installed".into()));
        }
        let mut version = 0;
        // SAFETY: `version` is valid for one write; this call is allowed before cuInit.
        unsafe { sys::cuDriverGetVersion(&raw mut version) }.result().map_err(|e| missing(describe(e)))?;
        if version < MIN_DRIVER {
            let (major, minor) = (version / 1000, version % 1000 / 10);
            return Err(missing(format!("the driver is for CUDA {major}.{minor}, 13.0 or newer is needed")));
        }
        let device = result::init().and_then(|()| result::device::get(0)).map_err(|e| missing(describe(e)))?;
        // SAFETY: the device was returned by `device::get`.
        let raw = unsafe { result::primary_ctx::retain(device) }.map_err(failed("opening the GPU"))?;
        let context = Context(device);
        // SAFETY: the context is retained until `context` is dropped.
        unsafe { result::ctx::set_current(raw) }.map_err(failed("opening the GPU"))?;
        Ok(Self(Rc::new(context)))
    }

    /// What the driver calls it.
    pub fn name(&self) -> Result<String> {
        result::device::get_name(self.0.0).map_err(failed("asking the GPU's name"))
    }

    /// Loads `kernel` from `image`, and compares its argument's size with the Rust struct's.
    pub fn function(&self, image: &'static Fatbin, kernel: Kernel) -> Result<Function> {
        let what = format!("loading kernel {}", kernel.symbol.to_string_lossy());
        // SAFETY: `image` is a fatbin that nvcc wrote, aligned by `Fatbin`.
        let module = unsafe { result::module::load_data(ptr::from_ref(image).cast()) }.map_err(failed(&what))?;
        let module = Module { raw: module, _device: self.clone() };
        // SAFETY: the module is loaded until `module` is dropped.
        let raw = unsafe { result::module::get_function(module.raw, kernel.symbol.into()) }.map_err(failed(&what))?;
        let size = argument_size(raw).map_err(failed(&what))?;
        if size != kernel.args_bytes {
            let why = format!("its argument has {size} bytes, the Rust struct {}", kernel.args_bytes);
            return Err(Error::Device { what, why });
        }
        Ok(Function { raw, kernel, shared_limit: Cell::new(DEFAULT_SHARED_BYTES), _module: module })
    }

    /// Device memory holding `bytes`.
    pub fn upload(&self, bytes: &[u8]) -> Result<Buffer> {
        let what = format!("allocating and filling {} bytes of GPU memory", bytes.len());
        // SAFETY: the context is current; the address is used only through `Buffer`.
        let address = unsafe { result::malloc_sync(bytes.len()) }.map_err(failed(&what))?;
        let buffer = Buffer { address, len: bytes.len(), _device: self.clone() };
        // SAFETY: the allocation has exactly `bytes.len()` bytes.
        unsafe { result::memcpy_htod_sync(address, bytes) }.map_err(failed(&what))?;
        Ok(buffer)
    }
}

/// Memory of the device, freed on drop.
pub struct Buffer {
    address: sys::CUdeviceptr,
    len: usize,
    _device: Device,
}

impl Buffer {
    /// Its device address, a multiple of 256.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Waits for all launched work, and copies the bytes to the host.
    pub fn download(&self) -> Result<Vec<u8>> {
        let what = format!("copying {} bytes from the GPU", self.len);
        let mut bytes = vec![0; self.len];
        // SAFETY: the destination has exactly the allocation's length. The copy is in stream order behind every launch,
        // all of which go to the default stream, and returns when it is done.
        unsafe { result::memcpy_dtoh_sync(&mut bytes, self.address) }.map_err(failed(&what))?;
        Ok(bytes)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated by `malloc_sync` and freed once. cuMemFree waits for work that uses it. A failure is one of
        // an earlier launch, which the next call reports again.
        let _ = unsafe { result::free_sync(self.address) };
    }
}

struct Module {
    raw: sys::CUmodule,
    _device: Device,
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded by `load_data` and unloaded once, after every function of it.
        let _ = unsafe { result::module::unload(self.raw) };
    }
}

/// A loaded kernel.
pub struct Function {
    raw: sys::CUfunction,
    kernel: Kernel,
    /// Dynamic shared memory that a launch may ask for now.
    shared_limit: Cell<u32>,
    _module: Module,
}

impl Function {
    /// Queues the kernel on the default stream. With `pdl` it may start before the kernels ahead of it end; for kernels
    /// that wait for them, and refused for others. An error is one of the launch, or of an earlier kernel.
    ///
    /// # Safety
    ///
    /// `A` is the kernel's argument struct, and every address in `args` is device memory of the extent and alignment that
    /// the struct states for it, alive until the kernel has ended.
    pub unsafe fn launch<A: Copy>(&self, launch: Launch, pdl: bool, args: &A) -> Result<()> {
        let what = format!("launching kernel {}", self.kernel.symbol.to_string_lossy());
        if size_of::<A>() != self.kernel.args_bytes || (pdl && !self.kernel.pdl) {
            let (found, wanted) = (size_of::<A>(), self.kernel.args_bytes);
            let why = format!("an argument of {found} bytes for {wanted}, or PDL for a kernel that does not wait");
            return Err(Error::Device { what, why });
        }
        if launch.shared_bytes > self.shared_limit.get() {
            // SAFETY: the function's module is loaded as long as `self` lives.
            unsafe {
                sys::cuFuncSetAttribute(
                    self.raw,
                    sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    launch.shared_bytes as c_int,
                )
            }
            .result()
            .map_err(failed(&what))?;
            self.shared_limit.set(launch.shared_bytes);
        }
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: launch.grid[0],
            gridDimY: launch.grid[1],
            gridDimZ: launch.grid[2],
            blockDimX: launch.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared_bytes,
            hStream: result::stream::null(),
            attrs: &raw mut attribute,
            numAttrs: pdl.into(),
        };
        let mut params = [ptr::from_ref(args).cast_mut().cast::<c_void>()];
        // SAFETY: `config` and `params` live through the call, which copies the argument; the argument has the size that
        // the kernel reads (compared at load); its addresses are the caller's promise.
        unsafe { sys::cuLaunchKernelEx(&raw const config, self.raw, params.as_mut_ptr(), ptr::null_mut()) }
            .result()
            .map_err(failed(&what))
    }
}

/// Bytes of a function's first argument.
fn argument_size(function: sys::CUfunction) -> Result<usize, DriverError> {
    let (mut offset, mut size) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: `function` belongs to a loaded module; both targets are valid for one write, and read only on success.
    unsafe {
        sys::cuFuncGetParamInfo(function, 0, offset.as_mut_ptr(), size.as_mut_ptr()).result()?;
        Ok(size.assume_init())
    }
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
