//! SentencePiece BPE: spaces become U+2581, pieces merge by score, and text without a piece falls back to byte tokens.
//!
//! Merges are derived from the pieces: every split of a piece into two pieces, best score first. HF `tokenizers` does the same
//! when it converts such a model.
use std::collections::HashMap;

use tokenizers::Model as _;
use tokenizers::models::bpe::BPE;

use super::{Kind, TokenizerError, Vocabulary};
use crate::weights::metadata::Metadata;

const SPACE: &str = "\u{2581}";
const SCORES: &str = "tokenizer.ggml.scores";
/// Maximum number of derived merges; Gemma's 262,144 pieces give about 600,000.
const MERGES_MAX: usize = 1 << 23;

/// A SentencePiece vocabulary.
pub(super) struct SentencePiece {
    bpe: BPE,
    space_prefix: bool,
}

impl SentencePiece {
    /// Also sets `vocabulary.bytes`.
    pub(super) fn read(metadata: &Metadata, vocabulary: &mut Vocabulary) -> Result<Self, TokenizerError> {
        let scores = metadata.numbers(SCORES)?.ok_or_else(|| super::missing(SCORES))?;
        if scores.len() != vocabulary.texts.len() || scores.iter().any(|s| s.is_nan()) {
            return Err(TokenizerError::Malformed(format!(
                "{SCORES}: expected {} numbers without NaN, found {}",
                vocabulary.texts.len(),
                scores.len()
            )));
        }
        let mut vocab = tokenizers::models::bpe::Vocab::new();
        let mut unknown = None;
        for (i, (text, kind)) in vocabulary.texts.iter().zip(&vocabulary.kinds).enumerate() {
            match kind {
                Kind::Normal | Kind::Byte => {}
                Kind::Unknown => unknown = Some(text.clone()),
                Kind::Control | Kind::UserDefined | Kind::Unused => continue,
            }
            vocab.entry(text.clone()).or_insert(i as u32);
        }
        let merges = merges(vocabulary, &scores)?;
        let mut builder = BPE::builder().vocab_and_merges(vocab, merges).byte_fallback(true).fuse_unk(true);
        if let Some(unknown) = unknown {
            builder = builder.unk_token(unknown);
        }
        let bpe = builder.build().map_err(|e| TokenizerError::Malformed(e.to_string()))?;
        let space_prefix = metadata.bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
        vocabulary.bytes = vocabulary.texts.iter().zip(&vocabulary.kinds).map(|(t, k)| token_bytes(t, *k)).collect();
        Ok(Self { bpe, space_prefix })
    }

    /// Whether encoding prepends a space, which decoding removes.
    pub(super) fn space_prefix(&self) -> bool {
        self.space_prefix
    }

    pub(super) fn encode(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        let spelt = if self.space_prefix { format!(" {text}") } else { text.to_owned() }.replace(' ', SPACE);
        let tokens = self.bpe.tokenize(&spelt).map_err(|e| TokenizerError::Encode(e.to_string()))?;
        ids.extend(tokens.iter().map(|t| t.id));
        Ok(())
    }
}

/// Every pair of pieces whose concatenation is a piece, by descending score of the result; ties in order of ids.
fn merges(vocabulary: &Vocabulary, scores: &[f64]) -> Result<Vec<(String, String)>, TokenizerError> {
    let normal = |i: &usize| vocabulary.kinds[*i] == Kind::Normal;
    let pieces: HashMap<&str, usize> =
        (0..vocabulary.texts.len()).rev().filter(normal).map(|i| (&*vocabulary.texts[i], i)).collect();
    let mut found: Vec<(f64, usize, usize, usize)> = Vec::new();
    for (text, &made) in &pieces {
        for (at, _) in text.char_indices().skip(1) {
            if let (Some(&left), Some(&right)) = (pieces.get(&text[..at]), pieces.get(&text[at..])) {
                found.push((scores[made], made, left, right));
            }
        }
        if found.len() > MERGES_MAX {
            return Err(TokenizerError::Malformed(format!("expected at most {MERGES_MAX} merges, found more")));
        }
    }
    found.sort_by(|a, b| b.0.total_cmp(&a.0).then_with(|| (a.1, a.2, a.3).cmp(&(b.1, b.2, b.3))));
    let text = |i: usize| vocabulary.texts[i].clone();
    Ok(found.into_iter().map(|(_, _, left, right)| (text(left), text(right))).collect())
}

fn token_bytes(text: &str, kind: Kind) -> Box<[u8]> {
    let byte = || u8::from_str_radix(text.strip_prefix("<0x")?.strip_suffix('>')?, 16).ok();
    match kind {
        Kind::Byte => byte().map_or_else(|| text.as_bytes().into(), |b| [b].into()),
        Kind::Normal | Kind::Unused => text.replace(SPACE, " ").into_bytes().into(),
        Kind::Unknown | Kind::Control | Kind::UserDefined => text.as_bytes().into(),
    }
}
