//! Gives the shared library its SONAME, the name under which the loader of a linked program
//! searches for it.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libannulus.so.1");
    }
}
