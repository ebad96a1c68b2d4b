//! Memory of the device, and memory of the host that the device reaches.

use std::{mem, ops::Range, ptr};

use cudarc::driver::{result, sys};

use super::{Device, failed};
use crate::error::{Error, Result};

/// Memory of the device, freed on drop.
pub struct Buffer {
    /// 0 once it belongs to someone else.
    address: sys::CUdeviceptr,
    len: usize,
    pub(super) device: Device,
}

impl Device {
    /// `len` bytes of unset device memory for `what`. Errors: [`Error::Device`] saying how much is free.
    pub fn alloc(&self, what: &str, len: usize) -> Result<Buffer> {
        // SAFETY: the context is current; the address is used only through `Buffer`. The driver refuses zero bytes.
        match unsafe { result::malloc_sync(len.max(1)) } {
            Ok(address) => Ok(Buffer { address, len, device: self.clone() }),
            Err(error) if error.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                let (free, total) = self.memory()?;
                Err(no_room(what, len as u64, free, total))
            }
            Err(error) => Err(failed(&format!("allocating {what}"))(error)),
        }
    }

    /// Refuses `len` bytes for `what` that are not free now.
    pub fn check_room(&self, what: &str, len: usize) -> Result<()> {
        let (free, total) = self.memory()?;
        if len as u64 <= free { Ok(()) } else { Err(no_room(what, len as u64, free, total)) }
    }

    /// Device memory holding `bytes`.
    pub fn upload(&self, bytes: &[u8]) -> Result<Buffer> {
        let buffer = self.alloc("a buffer", bytes.len())?;
        buffer.write(0, bytes)?;
        Ok(buffer)
    }

    /// `len` zeroed elements of host memory that the device can read and write at the same address.
    pub fn pinned<T: Plain>(&self, len: usize) -> Result<Pinned<T>> {
        let bytes = len * size_of::<T>();
        let what = format!("allocating {bytes} bytes of pinned host memory");
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the context is current; the pointer is used only through `Pinned`.
        let pointer = unsafe { result::malloc_host(bytes.max(1), flags) }.map_err(failed(&what))?.cast::<T>();
        // SAFETY: the allocation has `len` elements, page-aligned.
        unsafe { ptr::write_bytes(pointer, 0, len) };
        Ok(Pinned { pointer, len, device: self.clone() })
    }
}

/// The error for `need` bytes that do not fit.
pub(crate) fn no_room(what: &str, need: u64, free: u64, total: u64) -> Error {
    let gb = |bytes: u64| format!("{:.1} GB", bytes as f64 / 1e9);
    let why = format!("needs {}, {} of {} are free", gb(need), gb(free), gb(total));
    Error::Device { what: format!("allocating {what}"), why }
}

impl Buffer {
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

    /// Sets every byte to `value`, in stream order.
    pub fn fill(&self, value: u8) -> Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        // SAFETY: the allocation has `len` bytes and lives until `drop`, which waits for the stream.
        unsafe { result::memset_d8_async(self.address, value, self.len, self.device.stream()) }
            .map_err(failed("filling GPU memory"))
    }

    /// Copies `bytes` to `offset`, behind all queued work, and waits for it.
    ///
    /// # Panics
    /// When they do not fit.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        self.check(offset, bytes.len());
        let what = format!("copying {} bytes to the GPU", bytes.len());
        // SAFETY: the destination was checked; the source is borrowed until the copy has ended.
        unsafe { result::memcpy_htod_async(self.address + offset as u64, bytes, self.device.stream()) }
            .map_err(failed(&what))?;
        self.device.synchronize(&what)
    }

    /// Queues a copy of `source[range]` to the byte `offset`.
    ///
    /// # Safety
    /// Nobody writes that range, and `self` and `source` live, until the copy has ended.
    ///
    /// # Panics
    /// When they do not fit.
    pub unsafe fn queue_write<T: Plain>(&self, offset: usize, source: &Pinned<T>, range: Range<usize>) -> Result<()> {
        let bytes = range.len() * size_of::<T>();
        self.check(offset, bytes);
        let source = &source.as_slice()[range];
        // SAFETY: both ends were checked; the caller keeps them as they are.
        unsafe { result::memcpy_htod_async(self.address + offset as u64, source, self.device.stream()) }
            .map_err(failed("copying to the GPU"))
    }

    /// Copies `len` bytes from `offset` to the host, behind all queued work.
    ///
    /// # Panics
    /// When it does not have them.
    pub fn read(&self, offset: usize, len: usize) -> Result<Vec<u8>> {
        self.check(offset, len);
        let what = format!("copying {len} bytes from the GPU");
        let mut bytes = vec![0; len];
        // SAFETY: the source was checked; the destination lives until the copy has ended.
        unsafe { result::memcpy_dtoh_async(&mut bytes, self.address + offset as u64, self.device.stream()) }
            .map_err(failed(&what))?;
        self.device.synchronize(&what)?;
        Ok(bytes)
    }

    /// Copies from `offset` to the first `len` elements of `to`, behind all queued work, and waits for it.
    ///
    /// # Panics
    /// When either has fewer.
    pub fn read_pinned<T: Plain>(&self, offset: usize, to: &mut Pinned<T>, len: usize) -> Result<()> {
        self.check(offset, len * size_of::<T>());
        let what = format!("copying {} bytes from the GPU", len * size_of::<T>());
        let to = &mut to.as_mut_slice()[..len];
        // SAFETY: the source was checked; the destination lives until the copy has ended.
        unsafe { result::memcpy_dtoh_async(to, self.address + offset as u64, self.device.stream()) }
            .map_err(failed(&what))?;
        self.device.synchronize(&what)
    }

    /// All its bytes, behind all queued work.
    pub fn download(&self) -> Result<Vec<u8>> {
        self.read(0, self.len)
    }

    /// Lets go of the memory: whoever takes the address frees it.
    pub(super) fn take_address(&mut self) -> sys::CUdeviceptr {
        mem::take(&mut self.address)
    }

    pub(super) fn check(&self, offset: usize, len: usize) {
        check_range(self.len, offset, len);
    }
}

/// # Panics
/// When a memory of `all` bytes has no `len` bytes at `offset`.
pub(super) fn check_range(all: usize, offset: usize, len: usize) {
    let fits = offset.checked_add(len).is_some_and(|end| end <= all);
    assert!(fits, "{len} bytes at {offset} of a buffer of {all}");
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.address == 0 {
            return;
        }
        // SAFETY: allocated by `malloc_sync` and freed once. cuMemFree waits for work that uses it. A failure is one of
        // an earlier launch, which the next call reports again.
        let _ = unsafe { result::free_sync(self.address) };
    }
}

/// Types of which every bit pattern is a value.
pub trait Plain: Copy {}
impl Plain for u8 {}
impl Plain for u32 {}
impl Plain for f32 {}

/// Host memory that the device reads and writes, freed on drop.
pub struct Pinned<T> {
    pointer: *mut T,
    len: usize,
    device: Device,
}

impl<T: Plain> Pinned<T> {
    /// Its address, the same for host and device.
    pub fn address(&self) -> u64 {
        self.pointer as u64
    }

    /// Element `index` as memory has it now, whoever wrote it.
    ///
    /// # Panics
    /// When there is none.
    pub fn get(&self, index: usize) -> T {
        assert!(index < self.len, "element {index} of {}", self.len);
        // SAFETY: inside the allocation; every bit pattern is a `T`.
        unsafe { self.pointer.add(index).read_volatile() }
    }

    /// Sets element `index`.
    ///
    /// # Panics
    /// When there is none.
    pub fn set(&mut self, index: usize, value: T) {
        assert!(index < self.len, "element {index} of {}", self.len);
        // SAFETY: inside the allocation.
        unsafe { self.pointer.add(index).write_volatile(value) }
    }

    /// All elements; for memory that the device only reads.
    pub fn as_slice(&self) -> &[T] {
        // SAFETY: the allocation has `len` initialised elements.
        unsafe { std::slice::from_raw_parts(self.pointer, self.len) }
    }

    /// All elements; for memory that the device only reads. What it reads now must stay as it is.
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: as above, and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.len) }
    }
}

impl<T> Drop for Pinned<T> {
    fn drop(&mut self) {
        // Copies from it may be under way, after an error too, which whoever waits next will see.
        let _ = self.device.synchronize("freeing pinned memory");
        // SAFETY: allocated by `malloc_host` and freed once, when nothing uses it.
        let _ = unsafe { result::free_host(self.pointer.cast()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lack_of_memory_says_what_is_needed_and_what_is_there() {
        let error = no_room("the weights", 24_100_000_000, 10_200_000_000, 80_000_000_000);
        assert_eq!(error.to_string(), "allocating the weights failed: needs 24.1 GB, 10.2 GB of 80.0 GB are free");
    }
}
