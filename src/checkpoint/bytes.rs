//! Byte ranges of mapped files or of our own memory.

use std::{fmt, fs::File, ops::Deref, path::Path, sync::Arc};

use memmap2::Mmap;

use crate::error::{Error, Result};

/// A range of bytes that keeps its owner alive: part of a mapped file, or memory of our own.
#[derive(Clone)]
pub struct Bytes {
    owner: Owner,
    start: usize,
    len: usize,
}

#[derive(Clone)]
enum Owner {
    Map(Arc<Mmap>),
    Heap(Arc<[u8]>),
}

impl Bytes {
    /// Maps the whole of `path`, read-only. The file must not be changed while the bytes are in use. Folders, pipes and
    /// devices are refused: they have no length to check against, and opening a pipe would wait for its writer.
    pub fn open(path: &Path) -> Result<Self> {
        let kind = path.metadata().map_err(Error::io(path))?.file_type();
        if !kind.is_file() {
            let found = if kind.is_dir() { "a folder" } else { "a pipe, device or socket" };
            return Err(Error::format(path, "file", "a regular file", found));
        }
        let file = File::open(path).map_err(Error::io(path))?;
        // SAFETY: the mapping is private to this process and read-only; that nobody truncates or rewrites a checkpoint
        // in use is the documented condition of this function, as it is for every reader that maps its model.
        let map = unsafe { Mmap::map(&file) }.map_err(Error::io(path))?;
        let len = map.len();
        Ok(Self { owner: Owner::Map(Arc::new(map)), start: 0, len })
    }

    /// The bytes `start .. start + len` of this range; `None` when they are not all inside it.
    pub fn slice(&self, start: usize, len: usize) -> Option<Self> {
        let end = start.checked_add(len)?;
        (end <= self.len).then(|| Self { owner: self.owner.clone(), start: self.start + start, len })
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Self {
        Self { start: 0, len: bytes.len(), owner: Owner::Heap(bytes.into()) }
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let all: &[u8] = match &self.owner {
            Owner::Map(map) => map,
            Owner::Heap(heap) => heap,
        };
        &all[self.start..self.start + self.len]
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bytes({})", self.len)
    }
}
