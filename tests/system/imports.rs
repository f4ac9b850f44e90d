//! Import cycles between the files of a package are small, so that a file can be read and tested without many others.
//!
//! File A imports file B if a path in A, in a `use` or elsewhere, names B's module or an item in it: `crate::b::X`,
//! `super::X` (the parent's file), `b::X` where `mod b` is A's child. A re-export counts as an import by the
//! re-exporting file, and a path through it ends there. `mod b;` alone is not an import. Tests do not count.
use proc_macro2::{TokenStream, TokenTree};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use syn::parse::{ParseStream, Parser};
use syn::punctuated::Punctuated;
use syn::visit::{self, Visit};
use syn::{Attribute, Expr, Item, ItemMod, ItemUse, Macro, Meta, Pat, Token, UseTree, Visibility};
use system_tests::repository;

/// Files in the largest import cycle of a package. A ratchet: changes may only lower it. Six files can be read in an
/// hour.
const CYCLE_MAX: usize = 6;

#[test]
fn import_cycles_are_small() {
    let mut files = 0;
    for (root, _) in crate::tidy::files("rs").iter().filter(|(path, _)| path.ends_with("src/lib.rs")) {
        let sources = repository().join(root).with_file_name("");
        let imports = imports(&|path| fs::read_to_string(sources.join(path)).ok());
        files += imports.len();
        let cycle = largest_cycle(&imports);
        eprintln!("{}: {}", sources.display(), describe(&imports, &cycle));
        assert!(
            cycle.len() <= CYCLE_MAX,
            "at most {CYCLE_MAX} files of a package may form an import cycle; move what they share into a file that \
             imports none of them. {}: {}",
            sources.display(),
            describe(&imports, &cycle)
        );
    }
    assert!(files > 300, "the walk found the sources of all packages, not only {files}");
}

/// A cycle through every form of path. Tests, visibilities and other items' names do not count.
#[test]
fn a_planted_cycle_is_found() {
    let files = [
        ("lib.rs", "pub mod a; mod b; mod leaf; pub use b::Wide;"),
        ("a.rs", "mod child; use crate::b::B; pub use child::Kept; pub struct A(B);"),
        ("a/child.rs", "use super::A; use crate::leaf::{self, Leaf}; pub struct Kept(A, Leaf);"),
        (
            "b.rs",
            "pub struct B; fn f() { g(matches!(1, 1 if crate::c(leaf::x()))); } mod inner { use super::super::a::{Kept, A as _}; }",
        ),
        ("leaf.rs", "pub(in crate::a) struct Leaf; #[cfg(test)] mod tests { use crate::a::A; } #[cfg(test)] mod more;"),
    ];
    let imports = imports(&|path| files.iter().find(|(name, _)| *name == path).map(|(_, text)| (*text).to_owned()));
    let found: BTreeMap<&str, Vec<&str>> =
        imports.iter().map(|(from, to)| (from.as_str(), to.iter().map(String::as_str).collect())).collect();
    // `leaf::x` in `b.rs` does not name a module, so `b.rs` does not import `leaf`.
    let expected = [
        ("a.rs", vec!["a/child.rs", "b.rs"]),
        ("a/child.rs", vec!["a.rs", "leaf.rs"]),
        ("b.rs", vec!["a.rs", "lib.rs"]),
        ("leaf.rs", vec![]),
        ("lib.rs", vec!["b.rs"]),
    ];
    assert_eq!(found, BTreeMap::from(expected));
    let cycle = largest_cycle(&imports);
    assert_eq!(cycle, ["a.rs", "a/child.rs", "b.rs", "lib.rs"].map(String::from).into());
    let words = describe(&imports, &cycle);
    assert!(words.contains("4 files") && words.contains("a/child.rs → a.rs"), "{words}");
}

/// The files that each file imports.
type Imports = BTreeMap<String, BTreeSet<String>>;

/// A module's path from the crate root; empty for the root.
type Module = Vec<String>;

/// Reads a crate, starting with its `lib.rs`.
fn imports(read: &dyn Fn(&str) -> Option<String>) -> Imports {
    let mut tree = Tree::default();
    tree.read_file(read, Vec::new(), "lib.rs".into());
    let mut imports: Imports = tree.texts.keys().map(|path| (path.clone(), BTreeSet::new())).collect();
    for (path, (module, text)) in &tree.texts {
        let mut reader =
            Reader { tree: &tree, module: module.clone(), aliases: BTreeMap::new(), found: BTreeSet::new() };
        reader.visit_file(text);
        reader.found.remove(path);
        imports.insert(path.clone(), reader.found);
    }
    imports
}

/// The largest set of files that reach each other along imports.
fn largest_cycle(imports: &Imports) -> BTreeSet<String> {
    let reached: BTreeMap<&String, BTreeSet<&String>> =
        imports.keys().map(|file| (file, reach(imports, file))).collect();
    let cycles = imports.keys().map(|file| {
        let both = reached[file].iter().filter(|other| reached[**other].contains(file));
        both.map(|other| (*other).clone()).collect::<BTreeSet<String>>()
    });
    cycles.reduce(|best, next| if next.len() > best.len() { next } else { best }).unwrap_or_default()
}

/// All files that a file imports, directly or through others.
fn reach<'a>(imports: &'a Imports, from: &String) -> BTreeSet<&'a String> {
    let mut reached = BTreeSet::new();
    let mut open: Vec<&String> = imports[from].iter().collect();
    while let Some(file) = open.pop() {
        if reached.insert(file) {
            open.extend(&imports[file]);
        }
    }
    reached
}

fn describe(imports: &Imports, cycle: &BTreeSet<String>) -> String {
    let files: Vec<&str> = cycle.iter().map(String::as_str).collect();
    let inside = |file: &String| {
        let to: Vec<&str> = imports[file].intersection(cycle).map(String::as_str).collect();
        format!("  {file} → {}", to.join(", "))
    };
    let lines: Vec<String> = cycle.iter().map(inside).collect();
    format!("the largest cycle has {} files: {}\n{}", files.len(), files.join(", "), lines.join("\n"))
}

/// The modules of a crate, except test modules.
#[derive(Default)]
struct Tree {
    /// The file of each module; an inline module has the file around it.
    modules: BTreeMap<Module, String>,
    /// Each file's module and text.
    texts: BTreeMap<String, (Module, syn::File)>,
}

impl Tree {
    fn read_file(&mut self, read: &dyn Fn(&str) -> Option<String>, module: Module, path: String) {
        let text = read(&path).unwrap_or_else(|| panic!("no file {path}"));
        let text = syn::parse_file(&text).unwrap_or_else(|error| panic!("{path}: {error}"));
        self.modules.insert(module.clone(), path.clone());
        self.read_modules(read, &module, &path, &text.items);
        self.texts.insert(path, (module, text));
    }

    fn read_modules(&mut self, read: &dyn Fn(&str) -> Option<String>, module: &Module, path: &str, items: &[Item]) {
        for item in items {
            let Item::Mod(child) = item else { continue };
            if is_test(&child.attrs) {
                continue;
            }
            let inner = [module.clone(), vec![child.ident.to_string()]].concat();
            match &child.content {
                Some((_, items)) => {
                    self.modules.insert(inner.clone(), path.into());
                    self.read_modules(read, &inner, path, items);
                }
                None => self.read_file(read, inner.clone(), format!("{}.rs", inner.join("/"))),
            }
        }
    }
}

/// Collects the modules that one file's paths name.
struct Reader<'a> {
    tree: &'a Tree,
    /// The current module within the file.
    module: Module,
    /// Modules imported under a name.
    aliases: BTreeMap<String, Module>,
    found: BTreeSet<String>,
}

impl Reader<'_> {
    /// The deepest module that a path names; `None` if it begins outside the crate or with an item of this module.
    fn resolve(&self, path: &[String]) -> Option<Module> {
        let (first, rest) = path.split_first()?;
        let mut module = match first.as_str() {
            "crate" => Vec::new(),
            "self" => self.module.clone(),
            "super" => self.module.split_last()?.1.to_vec(),
            name => {
                let child = [self.module.clone(), vec![name.into()]].concat();
                let known = self.tree.modules.contains_key(&child).then_some(child);
                known.or_else(|| self.aliases.get(name).cloned())?
            }
        };
        for name in rest {
            if name == "super" {
                module.pop();
                continue;
            }
            let inner = [module.clone(), vec![name.clone()]].concat();
            if !self.tree.modules.contains_key(&inner) {
                break;
            }
            module = inner;
        }
        Some(module)
    }

    fn names(&mut self, path: &[String]) {
        if let Some(module) = self.resolve(path) {
            self.found.insert(self.tree.modules[&module].clone());
        }
    }

    /// Records one path of a `use`. If it ends with a module, its name becomes an alias.
    fn imports(&mut self, path: &[String], name: &str) {
        self.names(path);
        if let Some(module) = self.resolve(path).filter(|module| module.last() == path.last()) {
            self.aliases.insert(name.into(), module);
        }
    }

    /// Records the paths in tokens that are no Rust syntax.
    fn tokens(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Ident(name) if colons == 2 => {
                    path.push(name.to_string());
                    colons = 0;
                    continue;
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' && colons < 2 => {
                    colons += 1;
                    continue;
                }
                TokenTree::Ident(name) => self.token_path(&core::mem::replace(&mut path, vec![name.to_string()])),
                TokenTree::Group(group) => {
                    self.token_path(&core::mem::take(&mut path));
                    self.tokens(group.stream());
                }
                TokenTree::Punct(_) | TokenTree::Literal(_) => self.token_path(&core::mem::take(&mut path)),
            }
            colons = 0;
        }
        self.token_path(&path);
    }

    fn token_path(&mut self, path: &[String]) {
        if path.len() > 1 {
            self.names(path);
        }
    }

    fn use_tree(&mut self, before: &[String], tree: &UseTree) {
        let with = |name: &syn::Ident| match name.to_string() {
            itself if itself == "self" && !before.is_empty() => before.to_vec(),
            name => [before.to_vec(), vec![name]].concat(),
        };
        match tree {
            UseTree::Path(path) => self.use_tree(&with(&path.ident), &path.tree),
            UseTree::Name(name) => {
                let path = with(&name.ident);
                self.imports(&path, path.last().map_or("", String::as_str));
            }
            UseTree::Rename(rename) => self.imports(&with(&rename.ident), &rename.rename.to_string()),
            UseTree::Glob(_) => self.names(before),
            UseTree::Group(group) => group.items.iter().for_each(|tree| self.use_tree(before, tree)),
        }
    }
}

impl<'ast> Visit<'ast> for Reader<'_> {
    fn visit_file(&mut self, file: &'ast syn::File) {
        // A `use` may come after the code that relies on it.
        let uses = |item: &'ast Item| if let Item::Use(item) = item { Some(item) } else { None };
        file.items.iter().filter_map(uses).for_each(|item| self.visit_item_use(item));
        visit::visit_file(self, file);
    }

    #[expect(clippy::wildcard_enum_match_arm, reason = "syn's enum of items is non-exhaustive")]
    fn visit_item(&mut self, item: &'ast Item) {
        let attributes = match item {
            Item::Mod(item) => &item.attrs,
            Item::Fn(item) => &item.attrs,
            Item::Use(item) => &item.attrs,
            Item::Impl(item) => &item.attrs,
            _ => &Vec::new(),
        };
        if !is_test(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_mod(&mut self, item: &'ast ItemMod) {
        let outer = self.aliases.clone();
        self.module.push(item.ident.to_string());
        visit::visit_item_mod(self, item);
        self.module.pop();
        self.aliases = outer;
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        if item.leading_colon.is_none() && !is_test(&item.attrs) {
            self.use_tree(&[], &item.tree);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        // A single name is a variable, or an item imported by a `use`.
        if path.leading_colon.is_none() && path.segments.len() > 1 {
            let names: Vec<String> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
            self.names(&names);
        }
        visit::visit_path(self, path);
    }

    /// `pub(in crate::job)` restricts visibility; it is not an import of `job`.
    fn visit_visibility(&mut self, _: &'ast Visibility) {}

    /// Parses the arguments of standard library macros: expressions, and the pattern of `matches!`. In other macros
    /// every path counts that begins at a module.
    fn visit_macro(&mut self, item: &'ast Macro) {
        if item.path.is_ident("macro_rules") {
            return;
        }
        let expressions = Punctuated::<Expr, Token![,]>::parse_terminated;
        if let Ok(expressions) = expressions.parse2(item.tokens.clone()) {
            return expressions.iter().for_each(|expression| Reader::visit_expr(self, expression));
        }
        if let Ok((value, length)) = repeated.parse2(item.tokens.clone()) {
            return [value, length].iter().for_each(|expression| Reader::visit_expr(self, expression));
        }
        let Ok((value, pattern, condition)) = matching.parse2(item.tokens.clone()) else {
            return self.tokens(item.tokens.clone());
        };
        self.visit_expr(&value);
        self.visit_pat(&pattern);
        condition.iter().for_each(|condition| Reader::visit_expr(self, condition));
    }
}

/// Arguments of `vec!`: `value; length`.
fn repeated(input: ParseStream<'_>) -> syn::Result<(Expr, Expr)> {
    let value = input.parse()?;
    input.parse::<Token![;]>()?;
    Ok((value, input.parse()?))
}

/// Arguments of `matches!`: `value, pattern if condition`.
fn matching(input: ParseStream<'_>) -> syn::Result<(Expr, Pat, Option<Expr>)> {
    let value = input.parse()?;
    input.parse::<Token![,]>()?;
    let pattern = Pat::parse_multi_with_leading_vert(input)?;
    let condition = if input.parse::<Option<Token![if]>>()?.is_some() { Some(input.parse()?) } else { None };
    input.parse::<Option<Token![,]>>()?;
    Ok((value, pattern, condition))
}

/// Whether an item is compiled for tests only.
fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::List(list) if list.path.is_ident("cfg") => {
            list.parse_args::<syn::Path>().is_ok_and(|what| what.is_ident("test"))
        }
        Meta::Path(path) => path.is_ident("test"),
        Meta::List(_) | Meta::NameValue(_) => false,
    })
}
