import { readdirSync, readFileSync, statSync, writeFileSync } from "node:fs";
import { join, resolve } from "node:path";
import { gzipSync } from "node:zlib";
import { defineConfig, type Plugin } from "vite";

/** Files from this size on are compressed here: a server that starts would take a second for it. */
const LARGE_BYTES = 2 ** 20;

/** Writes large files a second time, compressed, as `NAME.gz`. */
function compressed(): Plugin {
  return {
    name: "compressed",
    apply: "build",
    writeBundle({ dir = "" }) {
      for (const name of readdirSync(join(dir, "assets"))) {
        const path = join(dir, "assets", name);
        if (statSync(path).size >= LARGE_BYTES)
          writeFileSync(`${path}.gz`, gzipSync(readFileSync(path)));
      }
    },
  };
}

// The pages go where the Python package looks for them; git ignores that folder.
export default defineConfig({
  base: "./",
  plugins: [compressed()],
  build: {
    outDir: resolve(import.meta.dirname, "../cleave/server/web"),
    emptyOutDir: true,
    target: "es2022",
    sourcemap: false,
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0,
    rollupOptions: {
      input: {
        dashboard: resolve(import.meta.dirname, "index.html"),
        join: resolve(import.meta.dirname, "join.html"),
      },
    },
  },
  worker: { format: "es" },
});
