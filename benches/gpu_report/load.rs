//! A GGUF of full size from the page cache to the GPU.

use std::{
    io::{self, Write},
    path::Path,
    time::Instant,
};

use flint_rs::{
    cancel::Cancel,
    checkpoint::{
        Checkpoint, DType,
        gguf::Value,
        gguf_writer::{ALIGNMENT, GgufWriter},
    },
    config::FlintConfig,
    convert::{WeightType, tensors},
    gpu::{GpuModel, RunOptions, Source},
    plan::Limits,
    weights::Weights,
};

use super::report::Result;

/// Loads that are timed.
const SAMPLES: usize = 3;

/// Writes a file of zeros into `folder`, which is on a disk and not in memory, and a row for each load of it. The file is
/// removed in the end.
pub fn measure(
    out: &mut dyn Write,
    date: &str,
    config: &FlintConfig,
    dtype: DType,
    limits: Limits,
    folder: &str,
) -> Result<()> {
    let to = if dtype == DType::Nvfp4 { WeightType::Nvfp4 } else { WeightType::Bf16 };
    let file = tempfile::Builder::new().suffix(".gguf").tempfile_in(folder)?;
    let mut metadata = config.to_gguf_metadata()?;
    metadata.insert("general.architecture".into(), Value::String("flint".into()));
    let tensors = tensors(config, to);
    // The header, and a hole for all the rest: in the page cache as any other bytes, and nothing on the disk.
    drop(GgufWriter::new(file.reopen()?, &metadata, &tensors)?);
    let header = file.as_file().metadata()?.len();
    let rest: u64 = tensors.iter().map(|tensor| tensor.bytes().next_multiple_of(ALIGNMENT)).sum();
    file.as_file().set_len(header + rest)?;
    let bytes = io::copy(&mut file.reopen()?, &mut io::sink())?;

    writeln!(out, "date,card,driver,format,layers,measure,gb,check_s,seconds,gb_s")?;
    for _ in 0..SAMPLES {
        let start = Instant::now();
        let (model, checked) = load(file.path(), limits)?;
        let (checked, seconds) = (checked - start, start.elapsed().as_secs_f64());
        let (device, gb) = (model.device(), bytes as f64 / 1e9);
        let fixed = format!("{date},{},{},{dtype},{}", device.name()?, device.driver()?, config.layers.len());
        let rate = gb / seconds;
        writeln!(out, "{fixed},load,{gb:.2},{:.2},{seconds:.2},{rate:.1}", checked.as_secs_f64())?;
    }
    Ok(out.flush()?)
}

/// As a user's program loads it; and when its bytes had been checked.
fn load(path: &Path, limits: Limits) -> Result<(GpuModel, Instant)> {
    let checkpoint = Checkpoint::open(path)?;
    let config = FlintConfig::from_checkpoint(&checkpoint)?;
    let weights = Weights::bind(&checkpoint, config, &mut |_, _| {}, &Cancel::default())?;
    let checked = Instant::now();
    let source = Source::Weights(&weights);
    let model = GpuModel::load(source, limits, RunOptions::default(), &mut |_, _| {}, &Cancel::default())?;
    Ok((model, checked))
}
