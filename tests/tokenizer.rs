//! The tokenizer against the `tokenizers` library on the same tokenizer.json.

mod tokenizer_support;

use std::sync::LazyLock;

use flint_rs::tokenizer::{ControlTokens, TokenKind, Tokenizer, TokenizerData};
use proptest::prelude::*;
use tokenizer_support::{Folder, SPECIAL, TAGS};

static FOLDER: LazyLock<Folder> = LazyLock::new(|| Folder::train(4000));
static LIBRARY: LazyLock<tokenizers::Tokenizer> =
    LazyLock::new(|| tokenizers::Tokenizer::from_file(FOLDER.file("tokenizer.json")).unwrap());
/// The library on the same file without its added tokens.
static LIBRARY_PLAIN: LazyLock<tokenizers::Tokenizer> = LazyLock::new(|| {
    let mut json = FOLDER.json("tokenizer.json");
    json["added_tokens"] = serde_json::json!([]);
    tokenizers::Tokenizer::from_bytes(json.to_string()).unwrap()
});
static OURS: LazyLock<Tokenizer> = LazyLock::new(|| Tokenizer::new(FOLDER.data().unwrap()).unwrap());
/// The same by way of GGUF metadata.
static GGUF: LazyLock<Tokenizer> = LazyLock::new(|| {
    let metadata = FOLDER.data().unwrap().to_gguf_metadata().unwrap();
    Tokenizer::new(TokenizerData::from_gguf_metadata("test.gguf".as_ref(), &metadata).unwrap()).unwrap()
});

fn all_ids() -> std::ops::Range<u32> {
    0..u32::try_from(OURS.vocab_size()).unwrap()
}

fn assert_as_the_library(text: &str) {
    for ours in [&*OURS, &*GGUF] {
        let parsed = ours.encode(text, ControlTokens::Parse).unwrap();
        assert_eq!(parsed, LIBRARY.encode_fast(text, false).unwrap().get_ids(), "{text:?}");
        assert_eq!(ours.decode(&parsed, false).unwrap(), text);
        let plain = ours.encode(text, ControlTokens::AsText).unwrap();
        assert_eq!(plain, LIBRARY_PLAIN.encode_fast(text, false).unwrap().get_ids(), "{text:?}");
        assert_eq!(ours.decode(&plain, true).unwrap(), text);
        for id in plain {
            assert_eq!(ours.token_kind(id), Some(TokenKind::Normal), "{text:?}");
        }
    }
}

/// Texts in which each rule of the pre-tokenizer decides something.
const TEXTS: &[&str] = &[
    "",
    " ",
    "fn main() {\n    let x: Vec<u8> = vec![0x1F; 4096]; // done\n}\n",
    "def f(self, *args):\n\treturn self.x[\"key\"] != None and not_a_word\n\n\n",
    "if (a&&b||!c) { *p++ = ~q ^ (r << 3); }",
    "I'm you're we've they'd he'll it's don't",
    "I'M YOU'RE WE'VE THEY'D HE'LL IT'S DON'T 'S'T'RE'VE'M'LL'D 'sx 'll",
    "CamelCaseWords HTTPServer aB Ab AB ab ǅungla ʰmodifier ªº",
    "你好,世界。今天天气很好 3个苹果 中文mixed英文 一龥丁龦㐀",
    "ひらがなとカタカナの混ざった日本語テキスト。ー・ヽヾゟ ﾊﾝｶｸ",
    "한국어 텍스트입니다. Здравствуй, мир! Γειά σου Κόσμε مرحبا بالعالم שלום עולם नमस्ते दुनिया สวัสดี",
    "e\u{301}a\u{308}o\u{302}\u{323} Z\u{351}\u{36B}\u{343}algo \u{301}start",
    "😀👩‍👩‍👧‍👦🏳️‍🌈👍🏽 text😀text 1️⃣ ☃️",
    "a\r\nb\r\n\r\nc\rd\n\re \r\n f",
    "\ta\t\tb \t c\u{a0}d\u{3000}e\u{2009}f\u{200b}g",
    "   leading and trailing   ",
    "a  b   c    d     e\n  \n   \n\tf\n ",
    "½ ² Ⅷ ٣٤٥٦ १२३४ 1,234,567.89 0b1010 1e-10 v1.2.3",
    "\u{0}\u{1}\u{7f}\u{80}\u{ad}\u{feff}\u{fffd}\u{10ffff}",
    "...!!!???\n\n ###\r\n ---- ====\n $$$ ^^^ ``` ~~~",
];

#[test]
fn ids_are_the_librarys() {
    for text in TEXTS {
        assert_as_the_library(text);
    }
    let digits = "31415926535897932384";
    for len in 1..=20 {
        let number = &digits[..len];
        for text in [number.to_owned(), format!("x{number}y"), format!(" {number} {number}."), format!("-{number}中")]
        {
            assert_as_the_library(&text);
        }
    }
    for len in 1..40 {
        for filler in [" ", "\n", "\t", "\r\n", " \n", "\u{3000}"] {
            assert_as_the_library(&format!("a{}b", filler.repeat(len)));
            assert_as_the_library(&filler.repeat(len));
        }
    }
}

#[test]
fn control_tokens_in_text_are_found_as_the_library_finds_them() {
    for name in SPECIAL.iter().chain(TAGS) {
        let cut = name.char_indices().next_back().unwrap().0;
        for text in [
            (*name).to_owned(),
            format!("{name}{name}"),
            format!("a{name}b"),
            format!(" {name} \n{name}\n "),
            format!("<{name}>"),
            format!("{}{name}", &name[..cut]),
            format!("中{name}12345{name}é"),
            name.to_uppercase(),
        ] {
            assert_as_the_library(&text);
        }
        let id = OURS.control_id(name).unwrap();
        assert_eq!(Some(id), LIBRARY.token_to_id(name));
        assert_eq!(OURS.encode(name, ControlTokens::Parse).unwrap(), [id]);
        assert_eq!(OURS.token_bytes(id).unwrap(), name.as_bytes());
        assert_eq!(OURS.is_control(id), SPECIAL.contains(name));
    }
}

/// tokenizer.json may say how a token takes in the spaces around it, or that it must be a word.
#[test]
fn rules_of_added_tokens_are_the_librarys() {
    let mut json = FOLDER.json("tokenizer.json");
    for (i, added) in json["added_tokens"].as_array_mut().unwrap().iter_mut().enumerate() {
        let rule = ["lstrip", "rstrip", "single_word", "normalized"][i % 4];
        added[rule] = true.into();
    }
    let folder = Folder::train(300);
    folder.write("tokenizer.json", &json.to_string());
    let library = tokenizers::Tokenizer::from_file(folder.file("tokenizer.json")).unwrap();
    let ours = Tokenizer::new(folder.data().unwrap()).unwrap();
    for name in SPECIAL.iter().chain(TAGS) {
        for text in
            [format!("a  {name}  b"), format!("a{name}b"), format!("\n{name}\t{name} {name}"), format!("-{name}-")]
        {
            let ids = ours.encode(&text, ControlTokens::Parse).unwrap();
            assert_eq!(ids, library.encode_fast(text.as_str(), false).unwrap().get_ids(), "{text:?}");
        }
    }
}

fn piece() -> impl Strategy<Value = String> {
    let names: Vec<&str> = SPECIAL.iter().chain(TAGS).copied().collect();
    prop_oneof![
        3 => any::<String>(),
        3 => "[ -~\t\r\n]{0,12}",
        1 => "[0-9]{1,9}",
        1 => r"[\p{Lu}\p{Ll}\p{Lo}\p{M}\p{N}\p{P}\p{Z}']{0,8}",
        1 => "[一-龥ぁ-んァ-ヶ]{1,6}",
        2 => prop::sample::select(names.clone()).prop_map(str::to_owned),
        1 => (prop::sample::select(names), 0usize..40).prop_map(|(name, cut)| name.chars().take(cut).collect()),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn ids_of_random_text_are_the_librarys(pieces in prop::collection::vec(piece(), 0..8)) {
        assert_as_the_library(&pieces.concat());
    }

    #[test]
    fn pieces_joined_are_the_whole_text(ids in prop::collection::vec(all_ids(), 0..60), skip in any::<bool>()) {
        let bytes: Vec<u8> = ids
            .iter()
            .filter(|id| !(skip && OURS.is_control(**id)))
            .flat_map(|id| OURS.token_bytes(*id).unwrap())
            .copied()
            .collect();
        let whole = String::from_utf8_lossy(&bytes);
        prop_assert_eq!(OURS.decode(&ids, skip).unwrap(), &*whole);
        let mut decoder = OURS.decoder(skip);
        let mut joined = String::new();
        for id in &ids {
            joined.push_str(&decoder.push(*id).unwrap());
            prop_assert!(whole.starts_with(&joined));
        }
        prop_assert_eq!(joined + &decoder.finish(), whole);
    }

    /// The one-byte tokens in any order: all that UTF-8 decoding can meet.
    #[test]
    fn random_bytes_decode_as_the_library_decodes_them(
        bytes in prop::collection::vec(prop_oneof![any::<u8>(), 0x80..=0xF8u8], 0..40),
    ) {
        let id = |byte: &u8| all_ids().find(|id| OURS.token_bytes(*id) == Some(&[*byte])).unwrap();
        let ids: Vec<u32> = bytes.iter().map(id).collect();
        let text = OURS.decode(&ids, false).unwrap();
        prop_assert_eq!(&text, &String::from_utf8_lossy(&bytes));
        prop_assert_eq!(text, LIBRARY.decode(&ids, false).unwrap());
    }
}
