//! Kernels: loading, checking, launching.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    ffi::{CStr, c_int, c_void},
    mem::MaybeUninit,
    ptr,
    rc::Rc,
};

use cudarc::driver::{
    result::{self, DriverError},
    sys,
};

use super::{Device, failed};
use crate::{
    error::{Error, Result},
    gpu::{Fatbin, Image},
    kernels::{Kernel, Launch},
};

/// Percent of an SM's memory that kernels of a chain want as shared memory. A block starts beside those of the kernel before
/// only where both want the same. 100 of Hopper's 228 KB hold two kernels, see `Launch::on_each`; the rest is needed as L1
/// cache, through which weights pass. [`Kernel::all_shared`] is for long ones whose weights do not.
const SHARED_PERCENT: c_int = 43;
/// Shared memory that every kernel may use without asking.
const DEFAULT_SHARED_BYTES: u32 = 48 << 10;

/// The kernels of some images; an image is loaded when the first of its kernels is asked for, and once.
pub struct Kernels {
    device: Device,
    images: &'static [Image],
    modules: RefCell<Vec<Option<Rc<Module>>>>,
    functions: RefCell<BTreeMap<&'static CStr, Function>>,
}

impl Device {
    /// Nothing of `images`, yet.
    pub fn kernels(&self, images: &'static [Image]) -> Kernels {
        let modules = RefCell::new(vec![None; images.len()]);
        Kernels { device: self.clone(), images, modules, functions: RefCell::default() }
    }
}

impl Kernels {
    /// The kernel, whose argument's size was compared with the Rust struct's. Called when a step is built, not when it runs.
    pub fn get(&self, kernel: Kernel) -> Result<Function> {
        if let Some(function) = self.functions.borrow().get(kernel.symbol) {
            return Ok(function.clone());
        }
        let what = format!("loading kernel {}", kernel.symbol.to_string_lossy());
        let Some(index) = self.images.iter().position(|image| image.has(kernel)) else {
            return Err(Error::Device { what, why: "no image of this build lists it".into() });
        };
        let slot = &mut self.modules.borrow_mut()[index];
        let module = match slot {
            Some(module) => module,
            None => slot.insert(Rc::new(Module::load(&self.device, self.images[index].fatbin).map_err(failed(&what))?)),
        };
        let raw = module.function(kernel).map_err(failed(&what))?;
        let size = argument_size(raw).map_err(failed(&what))?;
        if size != kernel.args_bytes {
            let why = format!("its argument has {size} bytes, the Rust struct {}", kernel.args_bytes);
            return Err(Error::Device { what, why });
        }
        let own = shared_bytes(raw).map_err(failed(&what))?;
        let shared_limit = Rc::new(Cell::new(DEFAULT_SHARED_BYTES.saturating_sub(own)));
        let function = Function { raw, kernel, shared_limit, module: Rc::clone(module) };
        self.functions.borrow_mut().insert(kernel.symbol, function.clone());
        Ok(function)
    }
}

/// A loaded image.
pub(super) struct Module {
    raw: sys::CUmodule,
    device: Device,
}

impl Module {
    fn load(device: &Device, fatbin: &'static Fatbin) -> Result<Self, DriverError> {
        // SAFETY: a fatbin that nvcc wrote, aligned by `Fatbin`.
        let raw = unsafe { result::module::load_data(ptr::from_ref(fatbin).cast()) }?;
        Ok(Self { raw, device: device.clone() })
    }

    /// The function itself, now and not at its first launch, which may be inside the recording of a graph.
    fn function(&self, kernel: Kernel) -> Result<sys::CUfunction, DriverError> {
        // SAFETY: the module is loaded as long as `self` lives, and `Function` holds it.
        unsafe {
            let raw = result::module::get_function(self.raw, kernel.symbol.into())?;
            sys::cuFuncLoad(raw).result()?;
            if kernel.pdl {
                let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
                let percent = if kernel.all_shared { 100 } else { SHARED_PERCENT };
                sys::cuFuncSetAttribute(raw, attribute, percent).result()?;
            }
            Ok(raw)
        }
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded and unloaded once, after every function and graph that holds it.
        let _ = unsafe { result::module::unload(self.raw) };
    }
}

/// A loaded kernel.
#[derive(Clone)]
pub struct Function {
    raw: sys::CUfunction,
    kernel: Kernel,
    /// Dynamic shared memory that a launch may ask for now, beside what the kernel takes by itself.
    shared_limit: Rc<Cell<u32>>,
    module: Rc<Module>,
}

impl Function {
    /// The kernel with its geometry and its argument, ready to be queued any number of times. Asks for the shared memory
    /// that `launch` needs.
    ///
    /// # Safety
    ///
    /// `A` is the kernel's argument struct, and every address in `args` is memory of the extent and alignment that the
    /// struct states for it, alive until every launch of the result has ended.
    pub unsafe fn call<A: Copy>(&self, launch: Launch, args: &A) -> Result<Call> {
        let what = || format!("launching kernel {}", self.kernel.symbol.to_string_lossy());
        if size_of::<A>() != self.kernel.args_bytes {
            let why = format!("an argument of {} bytes for {}", size_of::<A>(), self.kernel.args_bytes);
            return Err(Error::Device { what: what(), why });
        }
        if launch.shared_bytes > self.shared_limit.get() {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function's module is loaded as long as `self` lives.
            unsafe { sys::cuFuncSetAttribute(self.raw, attribute, launch.shared_bytes as c_int) }
                .result()
                .map_err(failed(&format!("{} with {} bytes of shared memory", what(), launch.shared_bytes)))?;
            self.shared_limit.set(launch.shared_bytes);
        }
        let mut words = vec![MaybeUninit::uninit(); size_of::<A>().div_ceil(size_of::<u64>())];
        // SAFETY: `words` has room for an `A`; both are plain memory.
        unsafe { ptr::from_ref(args).cast::<u8>().copy_to_nonoverlapping(words.as_mut_ptr().cast(), size_of::<A>()) };
        Ok(Call { function: self.clone(), launch, args: words })
    }

    /// Queues the kernel once.
    ///
    /// # Safety
    ///
    /// As [`Self::call`].
    pub unsafe fn launch<A: Copy>(&self, launch: Launch, pdl: bool, args: &A) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.call(launch, args) }?.queue(pdl)
    }
}

/// A kernel with its geometry and its argument.
#[derive(Clone)]
pub struct Call {
    function: Function,
    launch: Launch,
    /// The argument's bytes.
    args: Vec<MaybeUninit<u64>>,
}

impl Call {
    /// Which kernel.
    pub fn kernel(&self) -> Kernel {
        self.function.kernel
    }

    /// Its geometry and its price.
    pub fn launch(&self) -> Launch {
        self.launch
    }

    pub(super) fn module(&self) -> &Rc<Module> {
        &self.function.module
    }

    /// Queues it. With `pdl` a kernel that waits for those before it may start before they end, on cards that can do this. An
    /// error is one of the launch, or of an earlier kernel.
    pub fn queue(&self, pdl: bool) -> Result<()> {
        let launch = self.launch;
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
            hStream: self.function.module.device.stream(),
            attrs: &raw mut attribute,
            numAttrs: (pdl && self.function.kernel.pdl && self.function.module.device.has_dependent_launch()).into(),
        };
        let mut params = [self.args.as_ptr().cast_mut().cast::<c_void>()];
        // SAFETY: `config`, `attribute` and `params` live through the call, which copies the argument; the argument has
        // the size that the kernel reads (compared at load); its addresses are the promise made to `Function::call`.
        unsafe { sys::cuLaunchKernelEx(&raw const config, self.function.raw, params.as_mut_ptr(), ptr::null_mut()) }
            .result()
            .map_err(|error| failed(&format!("launching kernel {}", self.kernel().symbol.to_string_lossy()))(error))
    }
}

/// Bytes of shared memory that a function takes whatever a launch asks for.
fn shared_bytes(function: sys::CUfunction) -> Result<u32, DriverError> {
    let mut bytes = 0;
    let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
    // SAFETY: `function` belongs to a loaded module, and the target is valid for one write.
    unsafe { sys::cuFuncGetAttribute(&raw mut bytes, attribute, function) }.result()?;
    Ok(u32::try_from(bytes).unwrap_or(0))
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
