//! Deserializes structs from JSON objects only.

use std::{fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, Visitor, value::MapAccessDeserializer},
};

/// Struct that is deserialized from a JSON object only. By default serde also accepts an array of
/// its fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Object<T>(pub(crate) T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Fields<T> {
            type Value = Object<T>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Object<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Object)
            }
        }
        deserializer.deserialize_map(Fields(PhantomData))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize)]
    struct Pair {
        a: u8,
        b: u8,
    }

    #[test]
    fn only_an_object_is_accepted() {
        let Object(Pair { a, b }) = serde_json::from_str(r#"{"b":2,"a":1}"#).unwrap();
        assert_eq!((a, b), (1, 2));
        for text in ["[1,2]", "3", "null", "\"a\""] {
            let error = serde_json::from_str::<Object<Pair>>(text).unwrap_err().to_string();
            assert!(error.contains("expected an object"), "{error}");
        }
    }
}
