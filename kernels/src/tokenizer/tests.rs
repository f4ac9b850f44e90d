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

/// The real model, or `None` after saying so.
fn real_model() -> Option<Arc<ModelFile>> {
    let path = testing::real_model_path()?;
    Some(ModelFile::open(&path).expect("the model opens"))
}

fn oracle() -> serde_json::Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/oracles/smollm2_greedy.json");
    serde_json::from_slice(&std::fs::read(path).expect("the oracle is in the repository")).expect("valid JSON")
}

#[test]
fn oracle_prompts_have_the_oracles_ids() {
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
