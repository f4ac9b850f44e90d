//! Byte-level BPE: splits text into words of bytes, then merges pairs in the order of the vocabulary's merge list.
//!
//! wordchipper ranks a merge by the id of the token that it produces. To keep the model's merge order, ids are renumbered
//! internally (byte b is b, merge i is 256 + i). If two merges produce the same token, no single rank fits both; then HF
//! `tokenizers` is used, which ranks the merges themselves.
use std::collections::HashMap;

use tokenizers::Model as _;
use tokenizers::models::bpe::BPE;
use wordchipper::UnifiedTokenVocab;
use wordchipper::encoders::token_span_encoder::{SpanEncoder, SpanEncoderSelector};
use wordchipper::spanners::TextSpanningConfig;
use wordchipper::support::regex::RegexPattern;
use wordchipper::vocab::{ByteMapVocab, PairMapVocab, PairTokenMap, SpanMapVocab, SpanTokenMap};

use super::split::{Rules, Splitter};
use super::{Kind, TokenizerError, Vocabulary};
use crate::weights::metadata::Metadata;

const MERGES: &str = "tokenizer.ggml.merges";
/// Maximum number of merges: Llama 3 lists 280,147 for its 128,256 tokens.
const MERGES_MAX: usize = 1 << 22;

/// A byte-level BPE vocabulary.
pub(super) struct BytePair {
    splitter: Splitter,
    /// Words that are tokens and skip merging; empty if merges always apply.
    whole: HashMap<Box<[u8]>, u32>,
    /// Bytes without a token: removed before merging, as HF does.
    missing: [bool; 256],
    compose: bool,
    engine: Engine,
}

enum Engine {
    Ranked(Box<Ranked>),
    Listed(Box<Listed>),
}

/// Encodes with wordchipper.
struct Ranked {
    vocab: UnifiedTokenVocab<u32>,
    /// Model id of each internal id.
    back: Vec<u32>,
}

/// Encodes with HF `tokenizers`.
struct Listed {
    bpe: BPE,
    chars: [char; 256],
}

impl BytePair {
    /// Also sets `vocabulary.bytes`. The flag says whether prompts begin with beginning-of-text by default.
    pub(super) fn read(metadata: &Metadata, vocabulary: &mut Vocabulary) -> Result<(Self, bool), TokenizerError> {
        let rules = Rules::named(metadata.text("tokenizer.ggml.pre")?)?;
        let chars = byte_chars();
        let bytes = token_bytes(vocabulary, &chars);
        let merges = read_merges(metadata)?;
        // Tokens that merging may produce; excludes control and padding tokens.
        let normal = |i: usize| matches!(vocabulary.kinds[i], Kind::Normal | Kind::Byte | Kind::Unknown);
        let mut ids: HashMap<&str, u32> = HashMap::new();
        for i in (0..vocabulary.texts.len()).filter(|&i| normal(i)) {
            ids.entry(&vocabulary.texts[i]).or_insert(i as u32);
        }
        let mut missing = [false; 256];
        for (byte, c) in chars.iter().enumerate() {
            missing[byte] = !ids.contains_key(c.encode_utf8(&mut [0; 4]) as &str);
        }
        let whole = if rules.whole_words {
            (0..bytes.len()).rev().filter(|&i| normal(i)).map(|i| (bytes[i].clone(), i as u32)).collect()
        } else {
            HashMap::new()
        };
        let engine = match ranked(&ids, &bytes, &merges, &chars)? {
            Some(ranked) => Engine::Ranked(Box::new(ranked)),
            None => Engine::Listed(Box::new(listed(&ids, &merges, chars)?)),
        };
        let words = Self { splitter: rules.compile()?, whole, missing, compose: rules.compose, engine };
        vocabulary.bytes = bytes;
        Ok((words, rules.add_bos))
    }

    pub(super) fn engine(&self) -> &'static str {
        match self.engine {
            Engine::Ranked(_) => "wordchipper",
            Engine::Listed(_) => "tokenizers",
        }
    }

    pub(super) fn encode(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        let composed;
        let text = if self.compose && !text.is_ascii() {
            composed = compose(text);
            &composed
        } else {
            text
        };
        let mut merger = Merger::new(&self.engine);
        let mut result = Ok(());
        let mut kept = Vec::new();
        self.splitter.for_each_word(text, &mut |range| {
            let mut word = &text.as_bytes()[range];
            if word.iter().any(|&b| self.missing[usize::from(b)]) {
                kept.clear();
                kept.extend(word.iter().filter(|&&b| !self.missing[usize::from(b)]));
                word = &kept;
            }
            if let Some(&id) = self.whole.get(word) {
                ids.push(id);
            } else if !word.is_empty() && result.is_ok() {
                result = merger.merge(word, ids);
            }
        });
        result
    }
}

/// An engine with its scratch memory.
enum Merger<'a> {
    Ranked { engine: &'a Ranked, encoder: Box<dyn SpanEncoder<u32>>, inner: Vec<u32> },
    Listed { engine: &'a Listed, spelt: String },
}

impl<'a> Merger<'a> {
    fn new(engine: &'a Engine) -> Self {
        match engine {
            Engine::Ranked(engine) => {
                // wordchipper's default encoder builds a table for 100 ms; this one starts immediately and gives equal output.
                let encoder = SpanEncoderSelector::PriorityMerge.span_encoder_builder(&engine.vocab)();
                Self::Ranked { engine, encoder, inner: Vec::new() }
            }
            Engine::Listed(engine) => Self::Listed { engine, spelt: String::new() },
        }
    }

    /// Appends the ids of one word. All its bytes must have tokens.
    fn merge(&mut self, word: &[u8], ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        match self {
            Self::Ranked { engine, encoder, inner } => {
                inner.clear();
                encoder.encode_append_compound_span(&engine.vocab, word, inner);
                ids.extend(inner.iter().map(|&t| engine.back[t as usize]));
            }
            Self::Listed { engine, spelt } => {
                spelt.clear();
                spelt.extend(word.iter().map(|&b| engine.chars[usize::from(b)]));
                let tokens = engine.bpe.tokenize(spelt).map_err(|e| TokenizerError::Encode(e.to_string()))?;
                ids.extend(tokens.iter().map(|t| t.id));
            }
        }
        Ok(())
    }
}

/// The printable characters that represent bytes in byte-level vocabularies: printable Latin-1 as is, the others from U+0100
/// on.
fn byte_chars() -> [char; 256] {
    let mut next = 0x100;
    std::array::from_fn(|byte| {
        let printable = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let code = if printable { byte as u32 } else { next };
        next += u32::from(!printable);
        char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
    })
}

/// Bytes of each token: decoded from the byte characters for words, the text itself for all others.
fn token_bytes(vocabulary: &Vocabulary, chars: &[char; 256]) -> Vec<Box<[u8]>> {
    // All byte characters are below U+0144.
    let mut bytes = [None; 0x144];
    for (byte, &c) in chars.iter().enumerate() {
        bytes[c as usize] = Some(byte as u8);
    }
    let byte = |c: char| bytes.get(c as usize).copied().flatten();
    let decode = |(text, kind): (&String, &Kind)| {
        let spelt = matches!(kind, Kind::Normal | Kind::Byte | Kind::Unknown | Kind::Unused);
        let raw = if spelt { text.chars().map(byte).collect() } else { None };
        raw.unwrap_or_else(|| text.as_bytes().into())
    };
    vocabulary.texts.iter().zip(&vocabulary.kinds).map(decode).collect()
}

fn read_merges(metadata: &Metadata) -> Result<Vec<(&str, &str)>, TokenizerError> {
    let merges = metadata.texts(MERGES)?.ok_or_else(|| super::missing(MERGES))?;
    let mut pairs = Vec::new();
    for merge in merges {
        let text = std::str::from_utf8(merge).ok().and_then(|m| m.split_once(' '));
        // Spellings never contain a space; a leading space in unusual files is not a separator.
        let pair = text.filter(|(a, b)| !a.is_empty() && !b.is_empty() && pairs.len() < MERGES_MAX);
        let (a, b) = pair.ok_or_else(|| {
            let shown: String = String::from_utf8_lossy(merge).chars().take(80).collect();
            TokenizerError::Malformed(format!(
                "{MERGES}: expected at most {MERGES_MAX} pairs like \"a b\", found {shown:?} at {}",
                pairs.len()
            ))
        })?;
        pairs.push((a, b));
    }
    Ok(pairs)
}

/// Ranks merges by token if that preserves their order; `None` if it cannot.
fn ranked(
    ids: &HashMap<&str, u32>,
    bytes: &[Box<[u8]>],
    merges: &[(&str, &str)],
    chars: &[char; 256],
) -> Result<Option<Ranked>, TokenizerError> {
    const NOT_MADE: u32 = u32::MAX;
    // Maps model ids to internal ids, and back.
    let mut inner = vec![NOT_MADE; bytes.len()];
    let mut back = Vec::with_capacity(256 + merges.len());
    for (byte, c) in chars.iter().enumerate() {
        let id = ids.get(c.encode_utf8(&mut [0; 4]) as &str);
        if let Some(&id) = id {
            inner[id as usize] = byte as u32;
        }
        // Bytes without a token never reach the encoder.
        back.push(id.copied().unwrap_or(0));
    }
    let (mut pairs, mut spans) = (PairTokenMap::<u32>::default(), SpanTokenMap::<u32>::default());
    let mut made = String::new();
    for (a, b) in merges {
        made.clear();
        made.extend([*a, *b]);
        let &id = ids.get(&*made).ok_or_else(|| {
            TokenizerError::Malformed(format!("{MERGES}: {a:?} and {b:?} do not form a token of the vocabulary"))
        })?;
        let number = |part: &str| ids.get(part).map(|&id| inner[id as usize]).filter(|&n| n != NOT_MADE);
        let (Some(ia), Some(ib), NOT_MADE) = (number(a), number(b), inner[id as usize]) else {
            // A part that no earlier merge produces, or a token produced twice.
            return Ok(None);
        };
        let token = back.len() as u32;
        back.push(id);
        inner[id as usize] = token;
        spans.insert(bytes[id as usize].to_vec(), token);
        pairs.insert((ia, ib), token);
    }
    let table = ByteMapVocab::from_byte_to_token(&(0..256).collect::<Vec<u32>>());
    // Unused: `Splitter` splits the text.
    let config = TextSpanningConfig::from_pattern(RegexPattern::Basic(".".to_owned()));
    let vocab = SpanMapVocab::new(table.clone(), spans)
        .and_then(|spans| UnifiedTokenVocab::new(config, spans, PairMapVocab::new(table, pairs)?));
    Ok(vocab.ok().map(|vocab| Ranked { vocab, back }))
}

fn listed(ids: &HashMap<&str, u32>, merges: &[(&str, &str)], chars: [char; 256]) -> Result<Listed, TokenizerError> {
    let vocab: tokenizers::models::bpe::Vocab = ids.iter().map(|(text, &id)| ((*text).to_owned(), id)).collect();
    let merges = merges.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect();
    let bpe = BPE::builder().vocab_and_merges(vocab, merges).build();
    let bpe = bpe.map_err(|e| TokenizerError::Malformed(format!("{MERGES}: {e}")))?;
    Ok(Listed { bpe, chars })
}

fn compose(text: &str) -> String {
    let mut normalized = tokenizers::NormalizedString::from(text);
    normalized.nfc();
    normalized.get().to_owned()
}
