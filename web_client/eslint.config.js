import js from "@eslint/js";
import tseslint from "typescript-eslint";

export default tseslint.config(
  { ignores: ["lab-dist", "src/kernels/*.wasm.ts"] },
  js.configs.recommended,
  tseslint.configs.strict,
  {
    rules: {
      // Indices are within bounds where arrays are made to size.
      "@typescript-eslint/no-non-null-assertion": "off",
      "@typescript-eslint/no-unused-vars": [
        "error",
        { argsIgnorePattern: "^_", varsIgnorePattern: "^_", destructuredArrayIgnorePattern: "^_" },
      ],
    },
  },
);
