//! What `inspect` says of a checkpoint, and that it reads no tensor to say it.

mod formats;

use std::fs;

use flint_rs::{
    cancel::Cancel,
    checkpoint::DType,
    convert::{ConvertOptions, WeightType, convert},
    inspect::inspect,
};
use serde_json::json;

use self::formats::{gguf_tensors, names, to_safetensors, write_folder};

#[test]
fn says_what_a_checkpoint_holds() {
    let dir = tempfile::tempdir().unwrap();
    let (src, dst) = (dir.path().join("src"), dir.path().join("a.gguf"));
    write_folder(&src, &to_safetensors(&gguf_tensors(1, DType::Bf16)));
    let options = ConvertOptions { weight_type: WeightType::Nvfp4, overwrite: false };
    convert(&src, &dst, options, &mut |_, _| {}, &Cancel::default()).unwrap();

    // All names and shapes are written out in `formats`; per token, 2 of 3 experts and one row of 70 of the embedding.
    let values = |skip: &str| -> usize {
        names()
            .iter()
            .filter(|(name, ..)| !name.contains(skip))
            .map(|(.., shape)| shape.iter().product::<usize>())
            .sum()
    };
    let total = values("nothing");
    let experts = total - values("_exps");
    let active = total - experts / 3 - 69 * 128;
    let bf16 = 70 * 128 * 2;
    let f32s = 4 * (128 + 3 * (128 + 64 + 64 + 6 + 128) + 2 * 3 * 128);
    let scales = 4 * (1 + 4 + 3 + 2 * (4 + 3 + 3 * 3));
    let nvfp4 = (total - 70 * 128 - f32s / 4) / 64 * 36;

    let found = inspect(&dst).unwrap();
    let json = serde_json::to_value(&found).unwrap();
    assert_eq!(json["parameters"], json!({"total": total, "active": active}));
    assert_eq!(json["format"], "gguf");
    assert_eq!(json["files"], json!([{"path": dst, "bytes": fs::metadata(&dst).unwrap().len()}]));
    assert_eq!(json["config"]["hidden_size"], 128);
    assert_eq!(json["config"]["layers"][1], json!({"attention": "sliding", "rope": true, "mlp": "moe"}));
    assert_eq!(
        json["tensors"],
        json!([
            {"dtype": "BF16", "tensors": 1, "bytes": bf16},
            {"dtype": "F32", "tensors": 1 + 3 * 5 + 2 + 28, "bytes": f32s + scales},
            {"dtype": "NVFP4", "tensors": 1 + 7 + 2 * 10, "bytes": nvfp4},
        ])
    );
    assert_eq!(json["tokenizer"]["vocab_size"], 70);
    assert_eq!(
        json["tokenizer"]["end_tokens"],
        json!([{"id": 58, "text": "<|endoftext|>"}, {"id": 59, "text": "<|user|>"}])
    );
    assert_eq!(json["tokenizer"]["chat_template"], "{{ messages }}");
    let text = found.to_string();
    for part in [
        "gguf, ",
        "6 query and 3 key/value heads of 64; window 9",
        "2 of 3 experts of width 64, and a shared one of 256",
        "  0             full attention, no RoPE, dense MLP\n  1             sliding window, RoPE, MoE\n",
        "<|endoftext|> (58), <|user|> (59)",
        "chat template\n{{ messages }}",
    ] {
        assert!(text.contains(part), "{text} lacks {part}");
    }

    let folder = serde_json::to_value(inspect(&src).unwrap()).unwrap();
    assert_eq!(folder["format"], "safetensors");
    assert_eq!((&folder["config"], &folder["parameters"]), (&json["config"], &json["parameters"]));
    assert_eq!(folder["tokenizer"]["end_tokens"], json["tokenizer"]["end_tokens"]);

    fs::write(src.join("chat_template.jinja"), "red \x1b[31m\n").unwrap();
    assert!(inspect(&src).unwrap().to_string().contains("red \\u{1b}[31m\n"), "a terminal command went through");
    fs::remove_file(src.join("tokenizer.json")).unwrap();
    let without = inspect(&src).unwrap();
    assert!(without.tokenizer.is_none() && without.to_string().ends_with("\nno tokenizer\n"));
}

#[test]
fn reads_no_tensor() {
    let dir = tempfile::tempdir().unwrap();
    let src = dir.path().join("src");
    let mut tensors = to_safetensors(&gguf_tensors(2, DType::F32));
    for tensor in tensors.values_mut() {
        // NaN everywhere: nothing that looked at it would accept it.
        tensor.data = vec![0xFF; tensor.data.len()].into();
    }
    write_folder(&src, &tensors);
    assert_eq!(inspect(&src).unwrap().tensors[0].dtype, "BF16");
}
