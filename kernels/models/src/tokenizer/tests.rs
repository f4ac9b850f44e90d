//! Tests of tokenizers against the oracles and Hugging Face's implementation, and with broken vocabularies.
use std::sync::Arc;

use super::{Tokenizer, TokenizerError};
use crate::weights::testing::{GgufWriter, TINY_CONTROL, TinyModel};
use crate::weights::{ModelFile, testing};

/// Texts of mixed scripts, spaces, digits, contractions, control characters and special tokens.
const POOL: [&str; 50] = [
    "the",
    " quick",
    "'s",
    "'ll",
    "'",
    "12",
    "3.14",
    " ",
    "  ",
    "\n",
    "\t",
    "日本語",
    "né",
    "ß",
    "🙂",
    "²",
    "½",
    "Ⅳ",
    "٣",
    "fn main() {",
    "}",
    "_",
    "--",
    "...",
    "<|im_start|>",
    "<|im_end|>",
    "Hello",
    "WORLD",
    "\u{a0}",
    "\u{3000}",
    "x",
    "antidisestablishmentarianism",
    "http://",
    "é",
    "e\u{301}",
    "क्षि",
    "\r\n",
    " 7",
    "a1b2",
    "\u{7}",
    "\u{f1}",
    "\u{10000}",
    "\u{100000}",
    "\u{7f}",
    "\u{1f}",
    "\u{0}",
    "\u{4}",
    "\u{40000}",
    "\u{200d}",
    "0",
];

struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn text(&mut self) -> String {
        (0..=self.next() % 24).map(|_| POOL[(self.next() % POOL.len() as u64) as usize]).collect()
    }
}

/// The real model; if absent, prints that the test is skipped and returns `None`.
fn real_model() -> Option<Arc<ModelFile>> {
    let path = testing::real_model_path()?;
    Some(ModelFile::open(&path).expect("the model opens"))
}

fn oracle() -> serde_json::Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/oracles/smollm2_greedy.json");
    serde_json::from_slice(&std::fs::read(path).expect("the oracle is in the repository")).expect("valid JSON")
}

#[test]
fn oracle_prompts_encode_to_the_oracle_ids() {
    let Some(file) = real_model() else { return };
    let tokenizer = file.tokenizer().expect("a tokenizer");
    assert_eq!(tokenizer.engine(), "wordchipper");
    let oracle = oracle();
    let ends: Vec<u32> = serde_json::from_value(oracle["eog_ids"].clone()).expect("ids");
    assert_eq!(tokenizer.eos(), ends);
    assert!(!tokenizer.add_bos());
    for prompt in oracle["prompts"].as_array().expect("prompts") {
        let text = prompt["text"].as_str().expect("a text");
        let ids: Vec<u32> = serde_json::from_value(prompt["ids"].clone()).expect("ids");
        assert_eq!(tokenizer.encode_prompt(text).expect("encodes"), ids, "{text:?}");
        let shown: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.token_bytes(id).expect("known").to_vec()).collect();
        assert_eq!(String::from_utf8(shown).expect("text"), text);
    }
}

fn tokens(file: &ModelFile, key: &str) -> Vec<String> {
    let texts = file.metadata().texts(key).expect("strings").expect("there");
    texts.map(|t| String::from_utf8_lossy(t).into_owned()).collect()
}

/// The complete tokenizer as HF builds it for SmolLM2: Digits(individual) then ByteLevel, special tokens added.
fn hugging_face(file: &ModelFile) -> tokenizers::Tokenizer {
    use tokenizers::AddedToken;
    use tokenizers::models::bpe::{BPE, Vocab};
    use tokenizers::pre_tokenizers::{byte_level::ByteLevel, digits::Digits, sequence::Sequence};
    let texts = tokens(file, "tokenizer.ggml.tokens");
    let vocab: Vocab = texts.iter().enumerate().map(|(i, t)| (t.clone(), i as u32)).collect();
    let pair = |m: String| m.split_once(' ').map(|(a, b)| (a.to_owned(), b.to_owned())).expect("a pair");
    let merges = tokens(file, "tokenizer.ggml.merges").into_iter().map(pair).collect();
    let mut hf = tokenizers::Tokenizer::new(BPE::builder().vocab_and_merges(vocab, merges).build().expect("valid"));
    hf.with_pre_tokenizer(Some(Sequence::new(vec![
        Digits::new(true).into(),
        ByteLevel::new(false, true, true).into(),
    ])));
    let special: Vec<AddedToken> = texts[..17].iter().map(|t| AddedToken::from(t.clone(), true)).collect();
    hf.add_special_tokens(&special);
    hf
}

#[test]
fn random_texts_encode_as_hugging_face_does() {
    let Some(file) = real_model() else { return };
    let (ours, theirs) = (file.tokenizer().expect("a tokenizer"), hugging_face(&file));
    let mut numbers = Numbers(88_172_645_463_325_252);
    for _ in 0..20_000 {
        let text = numbers.text();
        let expected = theirs.encode(text.as_str(), false).expect("encodes").get_ids().to_vec();
        assert_eq!(ours.encode(&text, true).expect("encodes"), expected, "{text:?}");
    }
}

/// Text round-trips, except for bytes that the vocabulary lacks; streaming gives the same text as decoding in one call.
#[test]
fn random_texts_round_trip() {
    let Some(file) = real_model() else { return };
    let tokenizer = file.tokenizer().expect("a tokenizer");
    let mut numbers = Numbers(4_242);
    for _ in 0..3000 {
        let text = numbers.text();
        for special in [false, true] {
            let ids = tokenizer.encode(&text, special).expect("encodes");
            let mut decoder = tokenizer.decoder();
            let mut streamed: String = ids.iter().map(|&id| decoder.push(id)).collect();
            streamed += &decoder.finish();
            assert_eq!(streamed, tokenizer.decode(&ids));
            // The vocabulary lacks bytes 04, f1 and some others.
            let spellable = !text.contains(['\u{4}', '\u{40000}', '\u{100000}']);
            if spellable && !special {
                assert_eq!(streamed, text);
            }
            if special {
                assert_eq!(
                    ids.iter().filter(|&&id| id == 1).count(),
                    text.matches("<|im_start|>").count(),
                    "control tokens are parsed"
                );
            } else {
                assert!(!ids.iter().any(|&id| tokenizer.is_control(id)), "control tokens are text");
            }
        }
    }
}

#[test]
fn the_small_vocabulary() {
    let tokenizer = TinyModel::default().open().tokenizer().expect("a tokenizer");
    let hello = tokenizer.token_id("hello").expect("a token");
    let world = tokenizer.encode(" world", false).expect("encodes");
    assert_eq!(world, [tokenizer.token_id("Ġwor").expect("a token"), tokenizer.token_id("ld").expect("a token")]);
    let prompt = format!("{}hello{}", TINY_CONTROL[1], TINY_CONTROL[2]);
    assert_eq!(tokenizer.encode_prompt(&prompt).expect("encodes"), [1, hello, 2]);
    assert_eq!(tokenizer.decode(&[1, hello, 2]), "hello");
    assert_eq!(tokenizer.encode("hell", false).expect("encodes").len(), 1);
    assert_eq!((tokenizer.bos(), tokenizer.add_bos(), tokenizer.eos()), (Some(1), false, &[2, 0][..]));
    assert_eq!(tokenizer.token_bytes(5000), None);
    assert_eq!(tokenizer.decode(&[5000]), "");
    assert!(tokenizer.encode("", true).expect("encodes").is_empty());
    let long = "x".repeat(super::TEXT_BYTES_MAX + 1);
    assert!(matches!(tokenizer.encode(&long, false), Err(TokenizerError::TooLong { .. })));
}

fn tiny(change: impl Fn(&mut GgufWriter)) -> Result<Tokenizer, TokenizerError> {
    let mut w = TinyModel::default().writer();
    change(&mut w);
    ModelFile::from_bytes(w.write().into()).expect("the weights are sound").tokenizer()
}

/// Two merges that produce the same token have no single rank: HF ranks merges, and the text still round-trips.
#[test]
fn a_vocabulary_without_unique_ranks_uses_hugging_face() {
    let merges = ["h e", "l l", "he ll", "e ll", "h ell", "hell o", "Ġ w", "o r", "Ġw or", "l d"];
    let mut texts: Vec<String> = Vec::new();
    let listed = tiny(|w| {
        texts_with(w, &["ell"]);
        w.texts("tokenizer.ggml.merges", &merges);
    })
    .expect("a tokenizer");
    assert_eq!(listed.engine(), "tokenizers");
    texts.extend(["hello world", "ell", "hell", " wor ld"].map(str::to_owned));
    for text in &texts {
        assert_eq!(&listed.decode(&listed.encode(text, false).expect("encodes")), text);
    }
    // "h e" ranks before "e ll": hell is he + ll, not h + ell.
    assert_eq!(listed.encode("hello", false).expect("encodes"), [listed.token_id("hello").expect("a token")]);
    assert_eq!(listed.encode("ell", false).expect("encodes"), [listed.token_id("ell").expect("a token")]);
}

/// Replaces single-byte tokens at the end of the byte range by other texts, keeping the count.
fn texts_with(w: &mut GgufWriter, extra: &[&str]) {
    let file = ModelFile::from_bytes(TinyModel::default().writer().write().into()).expect("sound");
    let mut texts = tokens(&file, "tokenizer.ggml.tokens");
    for (i, text) in extra.iter().enumerate() {
        // From 0xff down: bytes that occur in no test text.
        texts[3 + 255 - i] = (*text).to_owned();
    }
    w.texts("tokenizer.ggml.tokens", &texts);
}

#[test]
fn broken_vocabularies_are_rejected() {
    let rejects = |change: &dyn Fn(&mut GgufWriter) -> &mut GgufWriter, part: &str| {
        let error = tiny(|w| _ = change(w)).expect_err(part).to_string();
        assert!(error.contains(part), "expected {part:?} in {error:?}");
    };
    rejects(&|w| w.text("tokenizer.ggml.model", "rwkv"), "\"rwkv\"; supported: gpt2");
    rejects(&|w| w.text("tokenizer.ggml.pre", "viking"), "\"viking\"");
    rejects(&|w| w.without("tokenizer.ggml.model"), "tokenizer.ggml.model");
    rejects(&|w| w.without("tokenizer.ggml.merges"), "tokenizer.ggml.merges");
    rejects(&|w| w.without("tokenizer.ggml.tokens"), "tokenizer.ggml.tokens");
    rejects(&|w| w.texts("tokenizer.ggml.merges", &["he"]), "pairs like");
    rejects(&|w| w.texts("tokenizer.ggml.merges", &["h x"]), "do not form a token");
    rejects(&|w| w.i32s("tokenizer.ggml.token_type", &[1, 2]), "kinds");
    rejects(&|w| w.u32("tokenizer.ggml.eos_token_id", 1 << 30), "of a vocabulary of");
    rejects(&|w| w.text("tokenizer.ggml.merges", "h e"), "found a string");
}

/// A SentencePiece vocabulary: space prefix, merges by score, byte fallback.
#[test]
fn sentence_piece_vocabularies() {
    let count = TinyModel::default().open().config().vocab;
    let pieces =
        ["▁", "h", "e", "l", "o", "w", "r", "d", "he", "ll", "hell", "▁hello", "▁w", "or", "▁wor", "ld", "ello"];
    let sp = |prefix: bool| {
        tiny(|w| {
            let mut texts: Vec<String> = vec!["<unk>".into(), "<s>".into(), "</s>".into()];
            let mut kinds = vec![2, 3, 3];
            texts.extend((0..256).map(|b| format!("<0x{b:02X}>")));
            kinds.extend([6; 256]);
            texts.extend(pieces.iter().take(count - 259).map(|&p| p.to_owned()));
            kinds.resize(texts.len(), 1);
            assert_eq!(texts.len(), count, "as many pieces as the model has rows");
            let scores: Vec<f32> = (0..count).map(|i| if i < 259 { 0.0 } else { -(i as f32) }).collect();
            w.text("tokenizer.ggml.model", "llama").texts("tokenizer.ggml.tokens", &texts);
            w.i32s("tokenizer.ggml.token_type", &kinds).f32s("tokenizer.ggml.scores", &scores);
            w.bool("tokenizer.ggml.add_space_prefix", prefix);
        })
        .expect("a tokenizer")
    };
    let tokenizer = sp(true);
    assert_eq!(tokenizer.engine(), "tokenizers");
    assert!(tokenizer.add_bos());
    let ids = tokenizer.encode_prompt("he ho").expect("encodes");
    assert_eq!(ids[0], 1);
    for text in ["he ho", "hello", "é 日本", "  two", "he\nhe", "x"] {
        let ids = tokenizer.encode(text, false).expect("encodes");
        assert_eq!(tokenizer.decode(&ids), text, "{ids:?}");
    }
    // A newline has no piece, so it becomes a byte token.
    let newline = tokenizer.encode("\n", false).expect("encodes");
    assert_eq!(newline.last(), Some(&(3 + 10)));
    // Text after a special token gets a space prefix again, as in the reference.
    let again = tokenizer.encode("<s>he", true).expect("encodes");
    assert_eq!(again[0], 1);
    assert_eq!(tokenizer.encode("he", false).expect("encodes"), again[1..]);
    let plain = sp(false);
    assert_eq!(plain.decode(&plain.encode(" he", false).expect("encodes")), " he");
}

/// The vocabularies of llama.cpp's own tests, with the ids from each model's original tokenizer. They are too large for this
/// repository: `MESHNODE_VOCABS` is the path of a folder with its `models/ggml-vocab-*` files.
#[test]
#[expect(clippy::print_stdout, reason = "a skipped test prints why")]
fn published_vocabularies_give_published_ids() {
    let Some(dir) = std::env::var_os("MESHNODE_VOCABS").map(std::path::PathBuf::from) else {
        println!("SKIPPED: set MESHNODE_VOCABS to a folder with llama.cpp's ggml-vocab-*.gguf, .inp and .out files");
        return;
    };
    let engines = [
        ("gpt-2", "wordchipper"),
        ("llama-bpe", "tokenizers"),
        ("qwen2", "wordchipper"),
        ("llama-spm", "tokenizers"),
        ("phi-3", "tokenizers"),
        ("starcoder", "wordchipper"),
        ("refact", "wordchipper"),
        ("command-r", "wordchipper"),
        ("mpt", "wordchipper"),
        ("falcon", "wordchipper"),
        ("deepseek-coder", "wordchipper"),
    ];
    let mut wrong = Vec::new();
    for (name, engine) in engines {
        let read = |end: &str| std::fs::read(dir.join(format!("ggml-vocab-{name}.gguf{end}"))).expect("a file");
        let start = std::time::Instant::now();
        let metadata = crate::weights::Metadata::from_gguf(&read("").into()).expect("a sound file");
        let tokenizer = Tokenizer::from_metadata(&metadata).expect("a tokenizer");
        println!("{name}: {} in {:?}", tokenizer.engine(), start.elapsed());
        if tokenizer.engine() != engine {
            wrong.push(format!("{name}: uses {}", tokenizer.engine()));
        }
        let texts = String::from_utf8(read(".inp")).expect("UTF-8");
        let lines = String::from_utf8(read(".out")).expect("UTF-8");
        for (text, line) in texts.split("\n__ggml_vocab_test__\n").zip(lines.lines()) {
            let ids: Vec<u32> = line.split_whitespace().map(|n| n.parse().expect("an id")).collect();
            let found = tokenizer.encode(text, false).expect("encodes");
            if found != ids {
                wrong.push(format!("{name}: {text:?}\n  expected {ids:?}\n  found    {found:?}"));
            }
            let back = tokenizer.decode(&found);
            if back != text && !text.is_empty() {
                wrong.push(format!("{name}: {text:?} decoded to {back:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
