//! Tests of constraints: random answers within them, replays, control tokens, and grammars that are invalid or explode.
use std::time::Instant;

use serde_json::Value;

use super::{Constraint, ConstraintError, GRAMMAR_BYTES_MAX, GrammarVocabulary};
use crate::sampler::random;
use crate::tokenizer::Tokenizer;
use crate::weights::testing::TinyModel;

const SCHEMA: &str = r#"start: %json {
    "x-guidance": {"whitespace_flexible": false},
    "type": "object", "additionalProperties": false, "required": ["name", "age", "tags", "kind"],
    "properties": {
        "name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3}, "kind": {"const": "x"}
    }
}"#;

fn vocabulary() -> (Tokenizer, GrammarVocabulary) {
    let tokenizer = TinyModel::default().open().tokenizer().expect("a tokenizer");
    let vocabulary = GrammarVocabulary::new(&tokenizer).expect("a vocabulary");
    (tokenizer, vocabulary)
}

fn ids(allowed: &[u32]) -> Vec<u32> {
    let all = (0..32 * allowed.len() as u32).filter(|id| allowed[*id as usize / 32] >> (id % 32) & 1 == 1);
    all.collect()
}

/// An answer of random allowed tokens, without its end-of-text token.
fn walk(constraint: &mut Constraint, tokenizer: &Tokenizer, seed: u64) -> Vec<u32> {
    let mut answer = Vec::new();
    loop {
        constraint.follow(&answer).expect("allowed tokens");
        let allowed = ids(&constraint.allowed());
        let token = allowed[(random(seed, answer.len() as u32) % allowed.len() as u64) as usize];
        if tokenizer.eos().contains(&token) {
            assert!(constraint.is_complete());
            let mut ended = answer.clone();
            ended.push(token);
            constraint.follow(&ended).expect("it may end here");
            assert!(constraint.is_complete());
            return answer;
        }
        assert!(answer.len() < 500, "the schema bounds the answer");
        answer.push(token);
    }
}

#[test]
fn random_answers_match_the_schema() {
    let (tokenizer, vocabulary) = vocabulary();
    for seed in 0..50 {
        let mut constraint = Constraint::new(&vocabulary, SCHEMA).expect("valid");
        let answer = walk(&mut constraint, &tokenizer, seed);
        let value: Value = serde_json::from_str(&tokenizer.decode(&answer)).expect("JSON");
        assert!(value["name"].as_str().expect("a name").chars().count() <= 6, "{value}");
        assert!(value["age"].as_u64().expect("an age") <= 150, "{value}");
        assert!(value["tags"].as_array().expect("tags").iter().all(|tag| tag == "a" || tag == "b"), "{value}");
        assert_eq!(value["kind"], "x");
    }
}

#[test]
fn a_replay_allows_the_same_tokens() {
    let (tokenizer, vocabulary) = vocabulary();
    let answer = walk(&mut Constraint::new(&vocabulary, SCHEMA).expect("valid"), &tokenizer, 7);
    let mut step_by_step = Constraint::new(&vocabulary, SCHEMA).expect("valid");
    let mut jumping = Constraint::new(&vocabulary, SCHEMA).expect("valid");
    for at in (0..=answer.len()).chain([3, 2, 9]) {
        let mut at_once = Constraint::new(&vocabulary, SCHEMA).expect("valid");
        at_once.follow(&answer[..at]).expect("allowed");
        step_by_step.follow(&answer[..at]).expect("allowed");
        jumping.follow(&[]).and_then(|()| jumping.follow(&answer[..at])).expect("allowed");
        let expected = at_once.allowed();
        assert_eq!(step_by_step.allowed(), expected);
        assert_eq!(jumping.allowed(), expected);
    }
}

#[test]
fn control_tokens_match_by_name_only() {
    let (tokenizer, vocabulary) = vocabulary();
    let start = tokenizer.token_id("<|im_start|>").expect("there");
    let mut any = Constraint::new(&vocabulary, "start: /(.|\\n)*/").expect("valid");
    let allowed = ids(&any.allowed());
    assert!(!allowed.contains(&start), "text is not a control token");
    assert!(tokenizer.eos().iter().all(|eos| allowed.contains(eos)), "it may end");
    let mut named = Constraint::new(&vocabulary, "start: <|im_start|> \"a\"").expect("valid");
    assert_eq!(ids(&named.allowed()), [start]);
    named.follow(&[start]).expect("allowed");
    let rejected = named.follow(&[start, start]).expect_err("not twice");
    assert_eq!(rejected, ConstraintError::Rejected { at: 1, token: start });
    assert!(ids(&named.allowed()).iter().all(|id| tokenizer.eos().contains(id)), "after an error it can only end");
    assert!(!named.is_complete());
}

#[test]
fn text_up_to_a_trigger_is_free_and_then_constrained() {
    let (tokenizer, vocabulary) = vocabulary();
    let grammar = r#"
        start: (called %json {"x-guidance": {"whitespace_flexible": false}, "const": {"a": 1}} "</call>")* TEXT
        called[lazy]: /(.|\n)*<call>/
        TEXT: /(.|\n)*/
    "#;
    let mut constraint = Constraint::new(&vocabulary, grammar).expect("valid");
    let encode = |text: &str| tokenizer.encode(text, false).expect("text");
    constraint.follow(&encode("I say <cal and more")).expect("free text");
    assert!(constraint.is_complete());
    let mut constraint = Constraint::new(&vocabulary, grammar).expect("valid");
    let mut answer = encode("well <call>");
    constraint.follow(&answer).expect("free text");
    assert!(!constraint.is_complete(), "the call is not complete");
    let next = ids(&constraint.allowed());
    assert!(next.iter().all(|id| tokenizer.decode(&[*id]).starts_with('{')), "only the call may follow");
    answer.extend(encode("{\"a\":1}</call>"));
    constraint.follow(&answer).expect("the call");
    assert!(constraint.is_complete());
}

#[test]
fn invalid_and_exploding_grammars_are_rejected_with_the_reason() {
    let (_, vocabulary) = vocabulary();
    let error = |grammar: &str| match Constraint::new(&vocabulary, grammar) {
        Ok(mut constraint) => constraint.follow(&[]).err().map(|e| e.to_string()).unwrap_or_default(),
        Err(error) => error.to_string(),
    };
    assert!(error("start: \"a").contains("1"), "the line: {}", error("start: \"a"));
    assert!(error("start: missing").contains("missing"));
    assert!(error("start: %json {\"type\": \"numbr\"}").contains("numbr"));
    assert!(error("start: %json {\"$ref\": \"#/$defs/none\"}").contains("none"));
    assert!(error(&format!("start: \"{}\"", "a".repeat(GRAMMAR_BYTES_MAX))).contains("at most 65536"));
    let began = Instant::now();
    let wide = (0..400)
        .map(|i| format!("\"p{i}\": {{\"type\": \"string\", \"minLength\": 3000, \"maxLength\": {}}}", 5000 + i));
    let wide =
        format!("start: %json {{\"type\": \"object\", \"properties\": {{{}}}}}", wide.collect::<Vec<_>>().join(","));
    let nested = format!("start: /{}a{}/", "(".repeat(3000), "){1,9}".repeat(3000));
    for grammar in [wide, nested] {
        drop(error(&grammar));
    }
    assert!(began.elapsed().as_secs() < 30, "work is bounded");
    let recursive =
        r##"start: %json {"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}}"##;
    assert_eq!(error(recursive), "", "recursion in JSON schemas is allowed");
}
