//! Templates as models ship them, beside what Python's Jinja makes of them; and templates that mean harm.
use std::time::{Duration, UNIX_EPOCH};

use super::{ChatMessage, ChatTemplate, ChatTemplateError, strftime};
use crate::weights::ModelFile;
use crate::weights::testing::{TinyModel, real_model_path};

fn message(role: &str, content: &str) -> ChatMessage {
    ChatMessage { role: role.into(), content: content.into() }
}

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::parse(Some(source), "<s>".into(), "</s>".into()).expect("valid Jinja")
}

#[test]
fn the_real_models_template_gives_the_oracles_prompt() {
    let Some(path) = real_model_path() else { return };
    let template = ModelFile::open(&path).expect("opens").chat_template().expect("a template");
    assert!(!template.is_fallback());
    let prompt = template.render(&[message("user", "What is the capital of France?")], true).expect("renders");
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/oracles/smollm2_greedy.json");
    let oracle: serde_json::Value = serde_json::from_slice(&std::fs::read(path).expect("there")).expect("JSON");
    let prompts = oracle["prompts"].as_array().expect("prompts");
    let wanted = prompts.iter().find(|p| p["name"] == "chat_capital").expect("the chat prompt");
    assert_eq!(prompt, wanted["text"].as_str().expect("a text"));
}

#[test]
fn a_model_without_a_template_gets_chatml() {
    let template = TinyModel::default().open().chat_template().expect("a template");
    assert!(template.is_fallback());
    let messages = [message("system", "s"), message("user", "u")];
    let wanted = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n";
    assert_eq!(template.render(&messages, false).expect("renders"), wanted);
    let open = format!("{wanted}<|im_start|>assistant\n");
    assert_eq!(template.render(&messages, true).expect("renders"), open);
}

/// What published templates use beyond plain Jinja: Python's methods, namespaces, refusals, dates, block trimming.
#[test]
fn templates_written_for_python() {
    let source = "{%- set ns = namespace(found=false) %}\n{{- bos_token }}\n{% for m in messages %}\n    \
                  {% if m.role.startswith('sys') %}{% set ns.found = true %}{% continue %}{% endif %}\n    \
                  {{- '[' + m['role'].upper() + ']' + m['content'].strip() + '\\n' }}\n{% endfor %}\n\
                  {%- if ns.found %}{{ messages[0].content.split(',')[-1] }}{% endif %}{{ eos_token }}\
                  {{ {'a': 1} | tojson }}{% if tools is not none %}tools{% endif %}";
    let messages = [message("system", "a,b"), message("user", "  hi <b> ")];
    let text = template(source).render(&messages, false).expect("renders");
    assert_eq!(text, "<s>\n[USER]hi <b>\n\nb</s>{\"a\": 1}");
    let json = "{{ messages | tojson }} {{ {'b': [1, 2]} | tojson(indent=2) }}";
    let text = template(json).render(&[message("user", "<\"é'>")], false).expect("renders");
    assert_eq!(text, "[{\"role\": \"user\", \"content\": \"<\\\"é'>\"}] {\n  \"b\": [\n    1,\n    2\n  ]\n}");
    let refuse = "{% if messages[0].role != 'user' %}{{ raise_exception('the user speaks first') }}{% endif %}ok";
    assert_eq!(template(refuse).render(&[message("user", "")], false).expect("renders"), "ok");
    let error = template(refuse).render(&[message("assistant", "")], false).expect_err("refused").to_string();
    assert!(error.contains("the user speaks first"), "{error}");
    assert_eq!(template("{{ strftime_now('%Y') }}").render(&[], false).expect("renders").len(), 4);
}

#[test]
fn hostile_templates_end() {
    let parse = |s: &str| ChatTemplate::parse(Some(s), String::new(), String::new());
    let error = parse("{% for %}").expect_err("not Jinja").to_string();
    assert!(error.contains("cannot be parsed"), "{error}");
    let endless = "{% for a in range(10000) %}{% for b in range(10000) %}{% for c in range(10000) %}{{ '' }}{% endfor \
                   %}{% endfor %}{% endfor %}";
    assert!(matches!(template(endless).render(&[], false), Err(ChatTemplateError::Render(_))));
    let content = "x".repeat(1 << 20);
    let long = "{% for i in range(1000) %}{{ messages[0].content }}{% endfor %}";
    assert!(matches!(template(long).render(&[message("user", &content)], false), Err(ChatTemplateError::TooLong)));
    assert!(matches!(template("{{ nothing.at.all }}").render(&[], false), Err(ChatTemplateError::Render(_))));
}

#[test]
fn dates() {
    let at =
        |seconds: u64| strftime("%a %A %d %b %B %Y %y-%m %H:%M:%S 100%%", UNIX_EPOCH + Duration::from_secs(seconds));
    assert_eq!(at(0).expect("valid"), "Thu Thursday 01 Jan January 1970 70-01 00:00:00 100%");
    assert_eq!(at(1_709_210_096).expect("valid"), "Thu Thursday 29 Feb February 2024 24-02 12:34:56 100%");
    assert_eq!(at(4_102_444_799).expect("valid"), "Thu Thursday 31 Dec December 2099 99-12 23:59:59 100%");
    assert!(strftime("%Q", UNIX_EPOCH).is_err());
}
