package android.content;

import android.net.Uri;
import java.io.FileNotFoundException;
import java.io.OutputStream;
import stub.Unknown;

public abstract class ContentResolver {
    ContentResolver() {}

    public final OutputStream openOutputStream(Uri uri) throws FileNotFoundException {
        throw Unknown.body();
    }
}
