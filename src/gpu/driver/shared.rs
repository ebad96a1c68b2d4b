//! Device memory for whoever outlives the thread that made it.

use std::ptr;

use cudarc::driver::{result, sys};

use super::{Buffer, failed, memory::check_range};
use crate::error::Result;

/// Device memory of any thread. It holds the context, so that it may outlive the [`super::Device`] it was made on.
#[derive(Debug)]
pub struct DeviceMemory {
    address: sys::CUdeviceptr,
    len: usize,
    device: sys::CUdevice,
    context: sys::CUcontext,
}

// SAFETY: the handles are the driver's, which any thread may use; `drop` brings the context with it.
unsafe impl Send for DeviceMemory {}
// SAFETY: nothing changes through a shared reference.
unsafe impl Sync for DeviceMemory {}

impl Buffer {
    /// The same memory. Work that was queued on it has to be waited for by the caller.
    pub fn into_shared(mut self) -> Result<DeviceMemory> {
        let device = self.device.0.device;
        // SAFETY: the device is open; this is released below.
        let context = unsafe { result::primary_ctx::retain(device) }.map_err(failed("keeping GPU memory"))?;
        Ok(DeviceMemory { address: self.take_address(), len: self.len(), device, context })
    }

    /// Queues a copy of `len` bytes from `offset` to the start of `to` moved by `at`.
    ///
    /// # Panics
    /// When either has fewer.
    pub fn queue_copy(&self, offset: usize, to: &DeviceMemory, at: usize, len: usize) -> Result<()> {
        self.check(offset, len);
        check_range(to.len, at, len);
        // SAFETY: both ends were checked, and freeing either waits for the stream.
        unsafe {
            result::memcpy_dtod_async(to.address + at as u64, self.address() + offset as u64, len, self.device.stream())
        }
        .map_err(failed("copying in GPU memory"))
    }
}

impl DeviceMemory {
    /// Its device address, a multiple of 256.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: memory and context are owned and given back once, with the context current while it matters. cuMemFree
        // waits for work that uses the memory, whoever queued it. A failure leaves nothing to do.
        unsafe {
            if sys::cuCtxPushCurrent_v2(self.context).result().is_ok() {
                let _ = result::free_sync(self.address);
                let mut popped = ptr::null_mut();
                let _ = sys::cuCtxPopCurrent_v2(&raw mut popped);
            }
            let _ = result::primary_ctx::release(self.device);
        }
    }
}
