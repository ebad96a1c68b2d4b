//! The bytes are a config.json. A configuration that is read is valid.
#![no_main]

use std::{collections::BTreeMap, path::Path};

use flint_rs::{
    checkpoint::{
        Checkpoint,
        safetensors::{SafetensorsDir, parse_json},
    },
    config::FlintConfig,
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let path = Path::new("fuzz");
    let Ok(config) = parse_json(path, bytes) else { return };
    let dir = SafetensorsDir { path: path.into(), config, tensors: BTreeMap::new() };
    if let Ok(config) = FlintConfig::from_checkpoint(&Checkpoint::Safetensors(dir)) {
        config.validate().expect("what was read is valid");
    }
});
