package android.content;

public interface SharedPreferences {
    SharedPreferences.Editor edit();

    boolean getBoolean(String a, boolean b);

    int getInt(String a, int b);

    String getString(String a, String b);

    public interface Editor {
        void apply();

        SharedPreferences.Editor clear();

        SharedPreferences.Editor putBoolean(String a, boolean b);

        SharedPreferences.Editor putInt(String a, int b);

        SharedPreferences.Editor putString(String a, String b);
    }
}
