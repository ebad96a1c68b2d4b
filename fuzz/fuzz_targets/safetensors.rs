//! The bytes are a safetensors shard. What is accepted covers the data once, in tensors of the size of their shapes.
#![no_main]

use std::path::Path;

use flint_rs::checkpoint::{Bytes, safetensors::read_shard};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(tensors) = read_shard(Path::new("fuzz.safetensors"), &Bytes::from(bytes.to_vec())) else { return };
    let mut data = 0;
    for tensor in tensors {
        assert_eq!(tensor.dtype.bytes_of(&tensor.shape), Some(tensor.data.len()));
        data += tensor.data.len();
    }
    let header = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    assert_eq!(8 + header + data, bytes.len());
});
