//! Binding names to weights: the same numbers whatever their names and layout, and every fault refused by name.
#![allow(clippy::float_cmp, reason = "values are equal to the bit, or wrong")]

mod formats;

use flint_rs::{
    Error,
    cancel::Cancel,
    checkpoint::{Checkpoint, DType},
    weights::{MatrixData, MlpWeights, Weights},
};

use self::formats::{
    EXPERTS, Tensors, all_values, config, f32_bytes, folder, gguf, gguf_tensors, is_projection, names, put,
    stack_experts, to_safetensors, values,
};

fn bind(checkpoint: &Checkpoint) -> Result<Weights, Error> {
    Weights::bind(checkpoint, config(), &mut |_, _| {}, &Cancel::default())
}

/// Asserts that binding fails with an error that says `name`, and `what` besides.
fn refuses(checkpoint: &Checkpoint, name: &str, what: &str) {
    match bind(checkpoint) {
        Ok(_) => panic!("bound in spite of {name}: {what}"),
        Err(Error::Format { name: got, expected, found, .. }) => {
            assert_eq!(got, name);
            assert!(
                format!("{expected} | {found}").contains(what),
                "{name}: expected {expected}, found {found}; not {what}"
            );
        }
        Err(other) => panic!("{other:?}"),
    }
}

/// F32 values of a tensor of the published layout, as an independent expectation.
fn floats(tensors: &Tensors, name: &str) -> Vec<f32> {
    tensors[name].data.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

#[test]
fn binds_every_tensor_to_its_place() {
    let tensors = gguf_tensors(1, DType::F32);
    let bound = all_values(&bind(&gguf(tensors.clone())).unwrap());
    for (name, _, shape) in names().into_iter().filter(|(name, ..)| name != "token_embd.weight") {
        let (base, want) = (name.trim_end_matches(".weight"), floats(&tensors, &name));
        if shape.len() == 3 {
            for (e, want) in want.chunks(want.len() / EXPERTS).enumerate() {
                assert_eq!(bound[&format!("{base}[{e}]")], want, "{name}, expert {e}");
            }
        } else {
            assert_eq!(bound[base], want, "{name}");
        }
    }
    assert_eq!(bound.len(), 3 + 12 + 2 * (9 + 1 + 3 + 3 * EXPERTS), "nothing twice and nothing else");
}

#[test]
fn decodes_every_type() {
    for dtype in [DType::F16, DType::Bf16, DType::Q8_0, DType::Nvfp4] {
        let tensors = gguf_tensors(2, dtype);
        let weights = bind(&gguf(tensors.clone())).unwrap();
        let (bytes, matrix) = (&tensors["blk.0.attn_output.weight"].data, &weights.layers[0].o);
        assert_eq!(matrix.data.dtype(), dtype);
        let stored: usize = names().iter().map(|(name, ..)| tensors[name].data.len()).sum();
        assert_eq!(weights.bytes(), stored);
        let scale = if dtype == DType::Nvfp4 { floats(&tensors, "blk.0.attn_output.scale")[0] } else { 1.0 };
        let want = |i: usize| match dtype {
            DType::F16 => half::f16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]).to_f32(),
            DType::Bf16 => f32::from_bits(u32::from_le_bytes([0, 0, bytes[2 * i], bytes[2 * i + 1]])),
            DType::Q8_0 => {
                let block = &bytes[i / 32 * 34..][..34];
                f32::from(block[2 + i % 32].cast_signed()) * half::f16::from_le_bytes([block[0], block[1]]).to_f32()
            }
            _ => {
                let mut block = [0.0; 64];
                flint_rs::nvfp4::decode(&bytes[i / 64 * 36..][..36], &mut block);
                block[i % 64] * scale
            }
        };
        for (i, value) in values(matrix).into_iter().enumerate() {
            assert_eq!(value, want(i), "{dtype}, value {i}");
        }
    }
}

#[test]
fn safetensors_hold_the_same_weights() {
    for dtype in [DType::Bf16, DType::F16, DType::F32, DType::Nvfp4] {
        let tensors = gguf_tensors(3, dtype);
        let want = all_values(&bind(&gguf(tensors.clone())).unwrap());
        let one_by_one = to_safetensors(&tensors);
        assert!(all_values(&bind(&folder(one_by_one.clone())).unwrap()) == want, "{dtype}, one by one");

        let mut renamed: Tensors = one_by_one
            .clone()
            .into_values()
            .map(|mut tensor| {
                tensor.name = tensor.name.trim_start_matches("model.").replace("softmax_offset", "sinks");
                (tensor.name.clone(), tensor)
            })
            .collect();
        assert!(all_values(&bind(&folder(renamed.clone())).unwrap()) == want, "{dtype}, other names");
        let twin = renamed["layers.1.self_attn.sinks"].clone();
        put(&mut renamed, "layers.1.self_attn.softmax_offset", twin.dtype, &twin.shape, twin.data.to_vec());
        refuses(&folder(renamed), "layers.1.self_attn.softmax_offset", "only tensors that a Flint");

        if dtype != DType::Nvfp4 {
            let mut stacked = one_by_one;
            let expert = stacked["model.layers.2.mlp.experts.0.up_proj.weight"].clone();
            stack_experts(&mut stacked);
            assert!(all_values(&bind(&folder(stacked.clone())).unwrap()) == want, "{dtype}, stacked");
            stacked.insert(expert.name.clone(), expert.clone());
            refuses(&folder(stacked), &expert.name, "only tensors that a Flint");
        }
    }
}

#[test]
fn repacks_model_opt_to_the_bytes_of_gguf() {
    let tensors = gguf_tensors(4, DType::Nvfp4);
    let weights = bind(&folder(to_safetensors(&tensors))).unwrap();
    let MlpWeights::Moe { experts, .. } = &weights.layers[2].mlp else { panic!("a layer of experts") };
    for (expert, want) in experts.iter().zip(tensors["blk.2.ffn_down_exps.weight"].data.chunks(128 * 36)) {
        let MatrixData::Nvfp4 { blocks, .. } = &expert.down.data else { panic!("{:?}", expert.down) };
        assert!(**blocks == *want);
    }
}

#[test]
fn names_each_missing_tensor() {
    let tensors = gguf_tensors(5, DType::Nvfp4);
    for (name, ..) in names() {
        let mut without = tensors.clone();
        without.remove(&name);
        refuses(&gguf(without), &name, "none");
    }
    let tensors = to_safetensors(&tensors);
    for name in tensors.keys().filter(|name| !name.ends_with("input_scale")) {
        let mut without = tensors.clone();
        without.remove(name);
        refuses(&folder(without), name, "none");
    }
}

#[test]
fn names_each_wrong_shape() {
    for checkpoint in [gguf as fn(Tensors) -> Checkpoint, folder] {
        let mut tensors = gguf_tensors(6, DType::Nvfp4);
        if matches!(checkpoint(Tensors::new()), Checkpoint::Safetensors(_)) {
            tensors = to_safetensors(&tensors);
        }
        for tensor in tensors.values().filter(|tensor| !tensor.name.ends_with("input_scale")) {
            // A row more, with its bytes; and the dimensions in reverse order, or split.
            let mut longer = tensor.shape.clone();
            longer.first_mut().map(|dim| *dim += 1).unwrap_or_else(|| longer.push(2));
            let values: usize = longer.iter().product();
            let bytes = values / tensor.dtype.block_len() * tensor.dtype.block_bytes();
            let mut swapped = tensors.clone();
            put(&mut swapped, &tensor.name, tensor.dtype, &longer, vec![0; bytes]);
            refuses(&checkpoint(swapped), &tensor.name, &format!("shape {longer:?}"));

            let mut reshaped = tensor.shape.clone();
            reshaped.insert(0, 1);
            if reshaped != [1] {
                let mut swapped = tensors.clone();
                put(&mut swapped, &tensor.name, tensor.dtype, &reshaped, tensor.data.to_vec());
                refuses(&checkpoint(swapped), &tensor.name, &format!("{reshaped:?}"));
            }
        }
    }
}

#[test]
fn names_each_wrong_type() {
    let tensors = gguf_tensors(7, DType::Bf16);
    for (name, _, shape) in names() {
        let count: usize = shape.iter().product();
        let wrong = match () {
            () if shape.len() == 1 || name.contains("ffn_gate_inp") => vec![DType::Nvfp4, DType::Q8_0, DType::U8],
            () => vec![DType::U8, DType::F8E4m3],
        };
        for dtype in wrong {
            let mut swapped = tensors.clone();
            put(&mut swapped, &name, dtype, &shape, vec![0; count / dtype.block_len() * dtype.block_bytes()]);
            refuses(&gguf(swapped), &name, &format!("type {dtype}"));
        }
    }
    let tensors = to_safetensors(&gguf_tensors(7, DType::Nvfp4));
    for (name, dtype) in [
        ("model.layers.0.self_attn.q_proj.weight", DType::F8E4m3),
        ("model.layers.0.self_attn.q_proj.weight_scale", DType::U8),
        ("model.layers.0.self_attn.q_proj.weight_scale_2", DType::Bf16),
        ("model.layers.1.mlp.experts.2.up_proj.weight_scale", DType::F32),
        ("model.layers.1.mlp.gate.weight", DType::U8),
    ] {
        let mut swapped = tensors.clone();
        let shape = tensors[name].shape.clone();
        put(&mut swapped, name, dtype, &shape, vec![0; shape.iter().product::<usize>() * dtype.block_bytes()]);
        refuses(&folder(swapped), name, &format!("type {dtype}"));
    }
}

#[test]
fn names_an_unknown_tensor() {
    let tensors = gguf_tensors(8, DType::Nvfp4);
    for name in
        ["blk.3.attn_norm.weight", "blk.0.attn_q.bias", "rope_freqs.weight", "blk.0.ffn_gate_inp.weight", "a.scale"]
    {
        let mut more = tensors.clone();
        put(&mut more, name, DType::F32, &[1], vec![0; 4]);
        refuses(&gguf(more), name, "F32 [1]");
        let mut more = to_safetensors(&tensors);
        put(&mut more, name, DType::F32, &[1], vec![0; 4]);
        refuses(&folder(more), name, "F32 [1]");
    }
    // A scale that would be ignored is no detail.
    let mut plain = gguf_tensors(8, DType::Bf16);
    put(&mut plain, "blk.0.attn_q.scale", DType::F32, &[1], f32_bytes(&[2.0]));
    refuses(&gguf(plain), "blk.0.attn_q.scale", "F32 [1]");
}

#[test]
fn companions_may_be_missing_but_not_wrong() {
    let tensors = gguf_tensors(9, DType::Nvfp4);
    let mut without = tensors.clone();
    without.retain(|name, _| name.ends_with("weight"));
    let weights = bind(&gguf(without)).unwrap();
    assert_eq!((weights.lm_head.scale(), weights.layers[0].q.scale()), (1.0, 1.0));

    let with = |name: &str, scales: &[f32]| {
        let mut swapped = tensors.clone();
        put(&mut swapped, name, DType::F32, &[scales.len()], f32_bytes(scales));
        gguf(swapped)
    };
    assert_eq!(bind(&with("output.scale", &[0.0])).unwrap().lm_head.scale(), 0.0);
    for (scales, what) in
        [(&[-0.5, 1.0, 1.0], "-0.5"), (&[1.0, f32::NAN, 1.0], "NaN"), (&[1.0, 1.0, f32::INFINITY], "inf")]
    {
        refuses(&with("blk.1.ffn_up_exps.scale", scales), "blk.1.ffn_up_exps.scale", what);
    }
    refuses(&with("blk.1.ffn_up_exps.scale", &[1.0]), "blk.1.ffn_up_exps.scale", "[1]");
    refuses(&with("blk.1.attn_q.scale", &[1.0; 3]), "blk.1.attn_q.scale", "[3]");

    // Scales of activations are not used, whatever they are.
    let mut more = tensors.clone();
    put(&mut more, "blk.1.ffn_up_exps.input_scale", DType::F32, &[2], f32_bytes(&[f32::NAN, -1.0]));
    bind(&gguf(more)).unwrap();
}

#[test]
fn a_router_bias_must_be_zero() {
    let mut tensors = gguf_tensors(10, DType::Nvfp4);
    put(&mut tensors, "blk.2.exp_probs_b.bias", DType::F32, &[EXPERTS], f32_bytes(&[0.0, -0.0, 0.0]));
    bind(&gguf(tensors.clone())).unwrap();
    put(&mut tensors, "blk.2.exp_probs_b.bias", DType::F32, &[EXPERTS], f32_bytes(&[0.0, 0.0, 1e-9]));
    refuses(&gguf(tensors.clone()), "blk.2.exp_probs_b.bias", "1e-9");
    put(&mut tensors, "blk.2.exp_probs_b.bias", DType::F32, &[2], f32_bytes(&[0.0, 0.0]));
    refuses(&gguf(tensors), "blk.2.exp_probs_b.bias", "[2]");
}

#[test]
fn vectors_must_be_finite() {
    for (name, _, shape) in names().into_iter().filter(|(.., shape)| shape.len() == 1) {
        let mut tensors = gguf_tensors(11, DType::Bf16);
        let mut values = vec![1.0; shape[0]];
        values[shape[0] - 1] = f32::NEG_INFINITY;
        put(&mut tensors, &name, DType::F32, &shape, f32_bytes(&values));
        refuses(&gguf(tensors), &name, "-inf");
    }
}

#[test]
fn names_the_tensor_of_a_bad_block_scale() {
    let tensors = gguf_tensors(12, DType::Nvfp4);
    for (name, _, shape) in names().into_iter().filter(|(name, _, shape)| is_projection(name, shape)) {
        let mut swapped = tensors.clone();
        let mut data = tensors[&name].data.to_vec();
        let last = data.len() - 36 + 3;
        data[last] = 0xFE;
        put(&mut swapped, &name, DType::Nvfp4, &shape, data.clone());
        bind(&gguf(swapped.clone())).unwrap();
        data[last] = 0xFF;
        put(&mut swapped, &name, DType::Nvfp4, &shape, data);
        refuses(&gguf(swapped), &name, "0xFF");
    }
    // NVIDIA's scales have a sign, and 0x7F is NaN there: neither means in GGUF what it meant.
    let tensors = to_safetensors(&tensors);
    for byte in [0x7F, 0x80, 0xB8, 0xFF] {
        let name = "model.layers.2.mlp.experts.1.down_proj.weight_scale";
        let mut swapped = tensors.clone();
        let mut data = tensors[name].data.to_vec();
        data[100] = byte;
        put(&mut swapped, name, DType::F8E4m3, &tensors[name].shape, data);
        refuses(&folder(swapped), name, &format!("{byte:#04X}"));
    }
}

#[test]
fn reports_progress_and_stops_when_asked() {
    let tensors = gguf_tensors(13, DType::Nvfp4);
    let total: usize = tensors.values().filter(|t| t.dtype == DType::Nvfp4).map(|t| t.data.len()).sum();
    let mut seen = Vec::new();
    let checkpoint = gguf(tensors);
    Weights::bind(&checkpoint, config(), &mut |done, total| seen.push((done, total)), &Cancel::default()).unwrap();
    assert_eq!((seen[0], seen[seen.len() - 1]), ((0, total as u64), (total as u64, total as u64)));

    let cancel = Cancel::default();
    let result = Weights::bind(&checkpoint, config(), &mut |_, _| cancel.cancel(), &cancel);
    assert!(matches!(result, Err(Error::Cancelled)));
}

#[test]
fn synthetic_projections_keep_the_variance_of_their_input() {
    for dtype in [DType::F32, DType::Bf16, DType::Nvfp4] {
        let weights = Weights::synthetic(config(), 14, dtype).unwrap();
        let variance = |values: &[f32]| {
            let mean = values.iter().sum::<f32>() / values.len() as f32;
            values.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / values.len() as f32
        };
        for (name, matrix) in [("q", &weights.layers[0].q), ("o", &weights.layers[2].o), ("head", &weights.lm_head)] {
            let gain = variance(&values(matrix)) * matrix.cols as f32;
            assert!((gain - 1.0).abs() < 0.06, "{dtype} {name}: {gain}");
            assert_eq!(matrix.data.dtype(), dtype);
        }
        assert!((variance(&values(&weights.embedding)) - 1.0).abs() < 0.05);
        assert!(weights.final_norm.iter().all(|w| (w - 1.0).abs() < 0.2));
        let again = all_values(&Weights::synthetic(config(), 14, dtype).unwrap());
        assert!(all_values(&weights) == again, "the same seed gave other weights");
        assert!(all_values(&Weights::synthetic(config(), 15, dtype).unwrap()) != again);
        let values: Vec<_> = again.values().filter(|v| v.len() > 100).collect();
        assert!((1..values.len()).all(|i| !values[..i].contains(&values[i])), "two tensors are equal");
    }
    let mut narrow = config();
    narrow.expert_intermediate_size = 96;
    let error = Weights::synthetic(narrow.clone(), 1, DType::Nvfp4).unwrap_err().to_string();
    assert!(error.starts_with("expert_intermediate_size: expected a multiple of 64"), "{error}");
    assert!(error.ends_with("found 96"), "{error}");
    assert!(Weights::synthetic(narrow, 1, DType::Bf16).is_ok());
}
