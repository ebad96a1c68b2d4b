//! Arrays in a GPU's memory, for libraries that take them without a copy: `DLPack` and the CUDA array interface. Their
//! contents are complete when the object exists, so no stream has to wait for another.

use std::{
    ffi::{CStr, c_void},
    ptr,
    sync::Arc,
};

use pyo3::{exceptions::PyBufferError, ffi, prelude::*, types::PyDict};

use crate::engine::DeviceLogits;

/// kDLCUDA, and the one device that is used.
const DEVICE: Device = Device { kind: 2, id: 0 };
/// kDLFloat, 32 bits.
const FLOAT32: DataType = DataType { code: 2, bits: 32, lanes: 1 };
/// The `DLPack` that is written.
const VERSION: Version = Version { major: 1, minor: 0 };

#[repr(C)]
#[derive(Clone, Copy)]
struct Device {
    kind: i32,
    id: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Version {
    major: u32,
    minor: u32,
}

/// `DLTensor`.
#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: Device,
    ndim: i32,
    dtype: DataType,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
struct Unversioned {
    tensor: Tensor,
    context: *mut c_void,
    deleter: unsafe extern "C" fn(*mut Self),
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
struct Versioned {
    version: Version,
    context: *mut c_void,
    deleter: unsafe extern "C" fn(*mut Self),
    flags: u64,
    tensor: Tensor,
}

/// A managed tensor with what it points to and what keeps it alive. The tensor comes first: its address is the holder's.
#[repr(C)]
struct Holder<M> {
    managed: M,
    shape: [i64; 2],
    strides: [i64; 2],
    _memory: Arc<DeviceLogits>,
}

/// The two forms of a managed tensor.
trait Managed: Sized {
    /// Of a capsule that nobody took yet.
    const NAME: &'static CStr;

    fn new(tensor: Tensor) -> Self;
    fn tensor(&mut self) -> &mut Tensor;

    /// # Safety
    /// Called once, with a pointer from [`capsule`].
    unsafe extern "C" fn delete(this: *mut Self) {
        // SAFETY: the tensor is the first field of a boxed holder.
        drop(unsafe { Box::from_raw(this.cast::<Holder<Self>>()) });
    }

    /// Frees a tensor that nobody took; whoever takes it renames the capsule.
    ///
    /// # Safety
    /// Python calls it, with a capsule from [`capsule`].
    unsafe extern "C" fn destroy(capsule: *mut ffi::PyObject) {
        // SAFETY: the capsule is alive, and under this name it holds what `capsule` put there.
        unsafe {
            if ffi::PyCapsule_IsValid(capsule, Self::NAME.as_ptr()) != 0 {
                Self::delete(ffi::PyCapsule_GetPointer(capsule, Self::NAME.as_ptr()).cast());
            }
        }
    }
}

impl Managed for Unversioned {
    const NAME: &'static CStr = c"dltensor";

    fn new(tensor: Tensor) -> Self {
        Self { tensor, context: ptr::null_mut(), deleter: Self::delete }
    }

    fn tensor(&mut self) -> &mut Tensor {
        &mut self.tensor
    }
}

impl Managed for Versioned {
    const NAME: &'static CStr = c"dltensor_versioned";

    fn new(tensor: Tensor) -> Self {
        Self { version: VERSION, context: ptr::null_mut(), deleter: Self::delete, flags: 0, tensor }
    }

    fn tensor(&mut self) -> &mut Tensor {
        &mut self.tensor
    }
}

/// The array as `M`, with a share in its memory.
fn capsule<'py, M: Managed>(py: Python<'py>, memory: &Arc<DeviceLogits>) -> PyResult<Bound<'py, PyAny>> {
    let shape = memory.shape().map(|n| n as i64);
    let tensor = Tensor {
        data: memory.address() as *mut c_void,
        device: DEVICE,
        ndim: 2,
        dtype: FLOAT32,
        shape: ptr::null(),
        strides: ptr::null(),
        byte_offset: 0,
    };
    let mut holder =
        Box::new(Holder { managed: M::new(tensor), shape, strides: [shape[1], 1], _memory: Arc::clone(memory) });
    let (shape, strides) = (holder.shape.as_ptr(), holder.strides.as_ptr());
    let tensor = holder.managed.tensor();
    (tensor.shape, tensor.strides) = (shape, strides);
    let pointer = Box::into_raw(holder);
    // SAFETY: the pointer is not null, the name is static, and the destructor is of this form. On failure nobody has
    // taken the holder.
    unsafe {
        let object = ffi::PyCapsule_New(pointer.cast(), M::NAME.as_ptr(), Some(M::destroy));
        Bound::from_owned_ptr_or_err(py, object).inspect_err(|_| M::delete(pointer.cast()))
    }
}

/// A float32 array `[T, V]` in a GPU's memory.
#[pyclass(frozen, module = "flint_rs")]
pub struct DeviceArray {
    memory: Arc<DeviceLogits>,
}

impl DeviceArray {
    pub fn new(logits: DeviceLogits) -> Self {
        Self { memory: Arc::new(logits) }
    }
}

#[pymethods]
impl DeviceArray {
    /// `(tokens, logits of each)`.
    #[getter]
    fn shape(&self) -> (usize, usize) {
        self.memory.shape().into()
    }

    /// A capsule for `from_dlpack` of other libraries.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        // Of CUDA's streams: none, unasked, the two default ones, and pointers. 0 would be either default one.
        if let Some(stream) = stream
            && !stream.extract::<i64>().is_ok_and(|stream| stream == -1 || stream > 0)
        {
            let found = stream.repr()?;
            return Err(PyBufferError::new_err(format!(
                "stream: expected None, -1, 1, 2 or the pointer of a CUDA stream, found {found}"
            )));
        }
        if let Some(device) = dl_device.filter(|&device| device != (DEVICE.kind, DEVICE.id)) {
            let here = (DEVICE.kind, DEVICE.id);
            return Err(PyBufferError::new_err(format!("dl_device: expected {here:?} or None, found {device:?}")));
        }
        if copy == Some(true) {
            return Err(PyBufferError::new_err("copy: expected False or None, found True; the consumer can copy"));
        }
        match max_version {
            Some((major, _)) if major >= VERSION.major => capsule::<Versioned>(py, &self.memory),
            _ => capsule::<Unversioned>(py, &self.memory),
        }
    }

    /// `(2, 0)`: the first CUDA device.
    #[allow(clippy::unused_self, reason = "a method in Python")]
    fn __dlpack_device__(&self) -> (i32, i32) {
        (DEVICE.kind, DEVICE.id)
    }

    /// Version 3 of the interface; no stream has to be waited for.
    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        dict.set_item("shape", self.shape())?;
        dict.set_item("typestr", "<f4")?;
        dict.set_item("data", (self.memory.address(), false))?;
        dict.set_item("version", 3)?;
        dict.set_item("strides", py.None())?;
        dict.set_item("stream", py.None())?;
        Ok(dict)
    }

    fn __repr__(&self) -> String {
        format!("<DeviceArray float32 {:?} on cuda:0>", self.memory.shape())
    }
}
