//! The bytes are a GGUF. What is accepted has the bytes that its shapes need, and a configuration that is read is valid.
#![no_main]

use std::path::Path;

use flint_rs::{
    checkpoint::{Bytes, Checkpoint, gguf::Gguf},
    config::FlintConfig,
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(gguf) = Gguf::from_bytes(Path::new("fuzz.gguf"), &Bytes::from(bytes.to_vec())) else { return };
    for (name, tensor) in &gguf.tensors {
        assert_eq!(*name, tensor.name);
        assert_eq!(tensor.dtype.bytes_of(&tensor.shape), Some(tensor.data.len()));
    }
    if let Ok(config) = FlintConfig::from_checkpoint(&Checkpoint::Gguf(gguf)) {
        config.validate().expect("what was read is valid");
    }
});
